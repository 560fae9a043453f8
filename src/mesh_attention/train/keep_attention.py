"""`cp.keep_attention()`: checkpoints that keep out and lse, and compute the rest of a block again.

Under an ordinary checkpoint a block attends, and communicates, a second time. Attention is most of
the work of long sequences, and its results are small beside all that a block computes, so they are
what is worth keeping (`request/kept_calls.py`); in the host's memory where a device has no room.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from mesh_attention.plan.problem.arguments import flag, number
from mesh_attention.request.kept_calls import (
    AroundAttention,
    Held,
    HeldHere,
    KeptCalls,
    Recording,
    Replaying,
)
from mesh_attention.request.operators import attention_op
from mesh_attention.train.offloaded import HostMemory, OffloadedBlock

Result = TypeVar("Result")
Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


class KeepAttention:
    """A `context_fn` of `torch.utils.checkpoint`, for any number of blocks, models and steps.

    host   memory that tensors wait in: `host.num_bytes`, `host.most_bytes`, `host.stayed_bytes`
           (did not fit `host_bytes`, and stayed on their device); None without `offload`
    """

    def __init__(self, *, offload: bool = False, host_bytes: int | None = None) -> None:
        limit = None if host_bytes is None else number("host_bytes", host_bytes, least=0)
        self.host = HostMemory(limit) if flag("offload", offload) else None

    def __call__(self) -> Contexts:
        if get_proxy_mode() is not None:  # a checkpoint in compiled code
            return create_selective_checkpoint_contexts([attention_op])  # type: ignore[no-untyped-call, no-any-return]
        if self.host is None:
            calls = KeptCalls()
            return Recording(calls), Replaying(calls)
        block = self.host.next_block()
        calls = KeptCalls(block.hold)
        inputs = _HeldInputs(block) if torch.is_grad_enabled() else None
        return _RecordingAfterInputs(calls, inputs), _ReplayingAhead(calls, block)

    def reentrant(self, function: Callable[..., Result]) -> Callable[..., Result]:
        """For `checkpoint(keep.reentrant(block), x, use_reentrant=True)`, which takes no
        `context_fn`; made anew for each checkpoint. What it offloads is out and lse."""
        calls, ahead = KeptCalls(), None
        if self.host is not None:
            ahead = self.host.next_block()
            calls = KeptCalls(ahead.hold)
        coming: list[AroundAttention] = [
            Recording(calls),
            Replaying(calls) if ahead is None else _ReplayingAhead(calls, ahead),
        ]

        def forward_then_again(*args: Any, **kwargs: Any) -> Result:
            with coming.pop(0) if len(coming) > 1 else coming[0]:
                return function(*args, **kwargs)

        return forward_then_again


class _HeldInputs:
    """The inputs of a block, by the hooks that PyTorch asks when a checkpoint saves them: after it
    has called `context_fn`, and before it enters what that returned."""

    def __init__(self, block: OffloadedBlock) -> None:
        self._block = block
        self._hooks = saved_tensors_hooks(self._hold, lambda held: held.take())
        self._hooks.__enter__()

    def _hold(self, x: Tensor) -> Held:
        # Parameters and what was computed for all blocks, such as rotary angles, stay: they are
        # there in any case.
        comes_from_a_block = type(x) is Tensor and x.grad_fn is not None
        return self._block.hold(x) if comes_from_a_block else HeldHere(x)

    def end(self) -> None:
        """The hooks of the checkpoint itself have been put over these."""
        autograd = torch._C._autograd
        checkpoint: Any = autograd._top_saved_tensors_default_hooks(True)
        autograd._pop_saved_tensors_default_hooks()
        self._hooks.__exit__()
        autograd._push_saved_tensors_default_hooks(*checkpoint)


class _RecordingAfterInputs(Recording):
    def __init__(self, calls: KeptCalls, inputs: _HeldInputs | None) -> None:
        super().__init__(calls)
        self._inputs = inputs

    def __enter__(self) -> AroundAttention:
        if self._inputs is not None:
            self._inputs.end()
        return super().__enter__()


class _ReplayingAhead(Replaying):
    def __init__(self, calls: KeptCalls, block: OffloadedBlock) -> None:
        super().__init__(calls)
        self._offloaded = block

    def __enter__(self) -> AroundAttention:
        self._offloaded.fetch_ahead()
        return super().__enter__()
