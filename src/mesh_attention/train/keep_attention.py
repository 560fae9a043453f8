"""`cp.keep_attention()`: checkpoints that keep out and lse, and compute the rest of a block again.

Attention is most of the work of long sequences, and its results are small beside all that a block
computes. `request/kept_calls.py` keeps them on the device; with `offload` they wait for the
backward pass in the host's memory, and so do the inputs of blocks.

On CUDA tensors are copied to pinned memory on a stream of their own while their block is computed,
and back while the block after it has its backward pass. Until the next block begins, a tensor also
stays on the device; then the computing stream waits for the copies, and a tensor that was changed
in place meanwhile is an error. On the CPU tensors are simply copied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any, Self, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from mesh_attention.errors import MeshAttentionError
from mesh_attention.plan.problem.arguments import flag, number
from mesh_attention.request.kept_calls import AroundAttention, Held, Recording, Replaying
from mesh_attention.request.operators import attention_op
from mesh_attention.runtime.session.modes import OUTSIDE_BACKWARD

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


class HostMemory:
    """Counts what is offloaded: `num_bytes` now, `most_bytes` at the most. What would exceed
    `limit_bytes` stays on its device: `stayed_bytes` in all."""

    def __init__(self, limit_bytes: int | None = None) -> None:
        self.limit_bytes = limit_bytes
        self.num_bytes = self.most_bytes = self.stayed_bytes = 0
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._latest: OffloadedBlock | None = None

    def next_block(self) -> OffloadedBlock:
        if self._latest is not None:
            for held in self._latest.tensors.values():
                with suppress(MeshAttentionError):  # changed: its own backward pass says so
                    held.leave()
        self._latest = OffloadedBlock(self, self._latest)
        return self._latest

    def hold(self, x: Tensor) -> Offloaded | None:
        num_bytes = x.nbytes
        if x.is_cuda:
            num_bytes = sum(1 << (size - 1).bit_length() for size in _pieces(x.nbytes))
        if self.limit_bytes is not None and self.num_bytes + num_bytes > self.limit_bytes:
            self.stayed_bytes += x.nbytes
            return None
        self.num_bytes += num_bytes
        self.most_bytes = max(self.most_bytes, self.num_bytes)
        if x.is_cuda and x.device not in self._streams:
            self._streams[x.device] = torch.cuda.Stream(x.device)  # type: ignore[no-untyped-call]
        return Offloaded(x, self, num_bytes, self._streams.get(x.device))


class OffloadedBlock:
    """The tensors that one block leaves to its backward pass. It knows those of the block `before`,
    whose backward pass comes next."""

    def __init__(self, memory: HostMemory, before: OffloadedBlock | None) -> None:
        self._memory = memory
        self.tensors = WeakValueDictionary[int, Offloaded]()  # that somebody still needs
        self._before = None if before is None else before.tensors

    def hold(self, x: Tensor) -> Held:
        held = self._memory.hold(x) if x.numel() else None
        if held is None:
            return Held(x)
        self.tensors[id(held)] = held
        return held

    def fetch_ahead(self) -> None:
        """Starts copies back: of what this block needs, then of what the block before it needs."""
        for held in (*self.tensors.values(), *(self._before or {}).values()):
            held.fetch()


class Offloaded(Held):
    """A tensor with a copy in the host's memory. `leave` ends its stay on the device, `fetch`
    starts a copy back, and `take`, in a backward pass, returns the tensor; another pass copies
    again."""

    def __init__(
        self, x: Tensor, memory: HostMemory, num_bytes: int, stream: torch.cuda.Stream | None
    ) -> None:
        self._memory, self._num_bytes = memory, num_bytes
        self._device, self._stream = x.device, stream
        self._here: Held | None = Held(x)
        self._fetched: Tensor | None = None
        self._like = torch.empty_like(x, device="meta")
        parts, pinned = _parts(x.detach()), stream is not None
        self._host = [torch.empty_like(part, device="cpu", pin_memory=pinned) for part in parts]
        self._copy(self._host, parts)

    def _copy(self, to: Sequence[Tensor], parts: Sequence[Tensor]) -> None:
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            for target, part in zip(to, parts, strict=True):
                target.copy_(part, non_blocking=self._stream is not None)
            if self._stream is not None:
                self._copied = self._stream.record_event()

    def _wait(self) -> None:
        """Lets the computing stream wait for the copy."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_event(self._copied)

    def leave(self) -> Tensor | None:
        if self._here is None:
            return None
        self._wait()
        x, self._here = self._here.take(), None
        return x

    def fetch(self) -> None:
        if self._here is None and self._fetched is None:
            # Memory that the computing stream has given up before the copy begins.
            self._fetched = torch.empty_like(self._like, device=self._device)
            self._copy(_parts(self._fetched), self._host)

    def take(self) -> Tensor:
        x = self.leave()
        if x is None:
            self.fetch()
            self._wait()
            x, self._fetched = self._fetched, None
        assert x is not None
        return x

    def __del__(self) -> None:
        self._memory.num_bytes -= self._num_bytes
        here = None if self._here is None else self._here._tensor
        for x in (here, self._fetched):
            if x is not None and self._stream is not None:  # nobody has waited for its copy
                x.record_stream(self._stream)


_SMALLEST_PIECE = 20  # a MiB, as a power of two


def _pieces(num_bytes: int) -> list[int]:
    """PyTorch pins memory in powers of two, so a tensor is pinned in pieces of such sizes; what is
    less than a MiB of it in one more."""
    bits = reversed(range(_SMALLEST_PIECE, num_bytes.bit_length()))
    sizes = [1 << bit for bit in bits if num_bytes >> bit & 1]
    rest = num_bytes - sum(sizes)
    return [*sizes, rest] if rest else sizes


def _parts(x: Tensor) -> Sequence[Tensor]:
    """Views of a tensor by its pieces; of one that is not contiguous there is one."""
    if not x.is_contiguous():
        return (x,)
    sizes = [size // x.element_size() for size in _pieces(x.nbytes)]
    return torch.split_with_sizes(x.view(-1), sizes)
