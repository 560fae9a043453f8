"""`cp.keep_attention()`: checkpoints that keep out and lse, and compute the rest of a block again.

Attention is most of the work of long sequences, and its results are small beside all that a block
computes. `request/kept_calls.py` keeps them on the device, `offloaded.py` in the host's memory.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Self, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from mesh_attention.errors import MeshAttentionError
from mesh_attention.plan.problem.arguments import flag, number
from mesh_attention.request.kept_calls import AroundAttention, Held, Recording, Replaying
from mesh_attention.request.operators import attention_op
from mesh_attention.runtime.session.modes import OUTSIDE_BACKWARD
from mesh_attention.train.offloaded import HostMemory, OffloadedBlock

Result = TypeVar("Result")


def in_compiled_code(offload: bool) -> Any:
    """The contexts of a checkpoint in code that is being compiled: attention is an operator of the
    graph, whose results it saves."""
    if offload:
        raise MeshAttentionError(
            "keep_attention(offload=True) inside compiled code: graphs keep tensors on their "
            "device; leave offload out, or compile the block inside of its checkpoint"
        )
    return create_selective_checkpoint_contexts([attention_op])  # type: ignore[no-untyped-call]


class KeepAttention(partial[Any]):
    """A `context_fn` of `torch.utils.checkpoint`, for any number of blocks, models and steps.
    `host` counts what waits in the host's memory; None without `offload`.

    It is a `partial`, since compiled code takes only that as `context_fn`, and calls its function.
    """

    def __new__(cls, *, offload: bool = False, host_bytes: int | None = None) -> Self:
        return super().__new__(cls, in_compiled_code, offload)

    def __init__(self, *, offload: bool = False, host_bytes: int | None = None) -> None:
        limit = None if host_bytes is None else number("host_bytes", host_bytes, least=0)
        if limit is not None and not offload:
            raise MeshAttentionError(f"host_bytes={limit} limits offload=True; set both")
        self.host = HostMemory(limit) if flag("offload", offload) else None

    def __call__(self, *, inputs: bool = True) -> tuple[AroundAttention, AroundAttention]:
        """Contexts for the forward pass of one checkpoint and for its recomputation."""
        if self.host is None:
            recording = Recording()
            return recording, Replaying(recording)
        block = self.host.next_block()
        recording = Recording(block.hold)
        if inputs and torch.is_grad_enabled():
            recording = Recording(block.hold, _hold_inputs(block))
        return recording, Replaying(recording, block.fetch_ahead)

    def reentrant(self, function: Callable[..., Result]) -> Callable[..., Result]:
        """For `checkpoint(keep.reentrant(block), x, use_reentrant=True)`, which takes no
        `context_fn`; made anew for each checkpoint. Inputs of the block are not offloaded."""
        contexts = [*self(inputs=False)]

        def forward_then_again(*args: Any, **kwargs: Any) -> Result:
            outside = torch._C._current_graph_task_id() == OUTSIDE_BACKWARD
            is_forward = outside or len(contexts) == 2
            if len(contexts) != (2 if is_forward else 1):
                raise MeshAttentionError(
                    "what keep.reentrant(block) made was called for a second checkpoint, "
                    "which would get the attention of the first; make it anew for each, as in "
                    "checkpoint(keep.reentrant(block), x, use_reentrant=True)"
                )
            # Of a backward pass that another may follow, what it needs stays.
            again = not is_forward and torch._C._autograd._get_current_graph_task_keep_graph()
            with contexts[0] if again else contexts.pop(0):
                return function(*args, **kwargs)

        return forward_then_again


def _hold_inputs(block: OffloadedBlock) -> Callable[[], None]:
    """Offloads the inputs of a checkpoint: it saves them after it has called its `context_fn`, and
    before it enters the context that this returned. Hooks are on in between; the function that is
    returned ends them."""

    def hold(x: Tensor) -> Held:
        # Parameters, and what was computed for all blocks such as rotary angles, are there anyway.
        comes_from_a_block = type(x) is Tensor and x.grad_fn is not None
        return block.hold(x) if comes_from_a_block else Held(x)

    hooks = saved_tensors_hooks(hold, lambda held: held.take())
    hooks.__enter__()

    def end() -> None:
        autograd: Any = torch._C._autograd
        of_checkpoint = autograd._top_saved_tensors_default_hooks(True)  # put over these
        autograd._pop_saved_tensors_default_hooks()
        hooks.__exit__()
        autograd._push_saved_tensors_default_hooks(*of_checkpoint)

    return end
