"""What every attention kernel of this package is asked and what it answers.

A kernel computes one block: some queries against some keys, whatever part of the whole
softmax that is. Blocks are joined by their log-sum-exp (`rows.py`), and the backward pass
of a block takes the log-sum-exp of the *whole* softmax (algorithm.md, section 4). `CheckedCall`
holds what a kernel returns against this.

Shapes: B batch, S queries, T keys, H query heads, G key/value heads (head h uses h // (H//G)),
D head size of queries and keys, E of values. Tensors may be strided views, innermost stride 1.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from mesh_attention.errors import MeshAttentionError
from mesh_attention.kernels.rows import accumulator_dtype
from mesh_attention.plan.language.plan import Direction
from mesh_attention.plan.language.program import CallKind


@dataclass(frozen=True)
class Full:
    """Every query sees every key."""


@dataclass(frozen=True)
class Causal:
    """A square block (S == T) in which query i sees the keys 0 .. i."""


@dataclass(frozen=True, eq=False)
class RowRange:
    """Query i sees the keys j with `lo[i] <= key_position[j] < hi[i]`, or where `lo` and `hi` are
    matrices, those with `lo[n, i] <= key_position[j] < hi[n, i]` for some n: then intervals are
    disjoint and in order, and those that a query does not have are empty and its last.

    Key positions need not be sorted: gathered rows lie as they came. The three tensors may live on
    the CPU while the block is on a GPU. Of one such mask many calls are made, so what a kernel
    makes of it, lists of visible blocks say, it may keep here under a key of its own.
    """

    lo: Tensor  # (S,), or of several intervals (N, S), integers >= 0
    hi: Tensor  # as lo
    key_position: Tensor  # (T,) integers >= 0; padding, which may hold anything, is at -1
    ascending: bool = False  # positions of keys are known to ascend, none of them padding
    from_first: bool = False  # and then: known to be seen from the first one on by every query
    kept: dict[Hashable, Any] = field(default_factory=dict)

    @property
    def num_intervals(self) -> int:
        return 1 if self.lo.dim() == 1 else self.lo.shape[0]


BlockMask = Full | Causal | RowRange


class Block(NamedTuple):
    """Some queries against some keys."""

    q: Tensor  # (B, S, H, D)
    k: Tensor  # (B, T, G, D)
    v: Tensor  # (B, T, G, E)
    mask: BlockMask
    softmax_scale: float
    softcap: float = 0.0  # if not zero, scores become softcap * tanh(scores / softcap)
    leave_sms: int = 0  # multiprocessors that a transfer in flight would like for itself
    # Where results are wanted, (out,) or (dq, dk, dv), None where they are not: a kernel may write
    # them there and return those tensors, which then need not be copied.
    into: tuple[Tensor | None, ...] = ()
    deterministic: bool = False  # the same bits every time, of kernels that can do so


class BackwardInputs(NamedTuple):
    """What a backward pass is given besides its block. `lse`, `out` and
    `delta = rowsum(out * grad_out)` belong to the whole softmax, of which the block is a part;
    `BackwardNeeds` says which of them are sure to be there."""

    grad_out: Tensor  # (B, S, H, E)
    out: Tensor | None
    lse: Tensor  # (B, H, S)
    delta: Tensor | None


MaskKind = CallKind  # calls of plans and blocks of kernels have the same
_KINDS = {Full: MaskKind.FULL, Causal: MaskKind.CAUSAL, RowRange: MaskKind.RANGE}
_SEEN = {
    MaskKind.FULL: "no mask",
    MaskKind.CAUSAL: "a causal mask",
    MaskKind.RANGE: "a mask by which each query sees an interval of keys",
}


def kind_of(mask: BlockMask) -> MaskKind:
    return _KINDS[type(mask)]


@dataclass(frozen=True)
class Request:
    """All that decides whether a kernel can do a pass of a block; sequence lengths never do."""

    direction: Direction
    device_type: str
    capability: tuple[int, int] | None  # of a CUDA device
    dtype: torch.dtype
    head_dim: int
    v_head_dim: int
    num_heads: int
    num_kv_heads: int
    mask: MaskKind
    softcap: bool = False
    padded: bool = False  # row ranges: rows that nobody sees may hold anything, also NaN
    scattered: bool = False  # row ranges: keys lie one by one, not in runs
    intervals: int = 1  # row ranges: of keys that a query may see, at most
    deterministic: bool = False
    any_heads: bool = False  # bits of a head that do not depend on the number of heads
    lse_gradient: bool = False  # backward: delta is that of out less the gradient of lse

    def why_not_grouped(self) -> str | None:
        """Why query heads cannot share KV heads equally; None if they can."""
        if self.num_heads % self.num_kv_heads:
            return f"{self.num_heads} heads are no multiple of {self.num_kv_heads} KV heads"
        return None

    def __str__(self) -> str:
        """In words, for those whose request is refused."""
        where = self.device_type
        if self.capability is not None:
            where += f" (compute capability {'.'.join(map(str, self.capability))})"
        dims = f"{self.head_dim}"
        if self.v_head_dim != self.head_dim:
            dims += f" (those of V of {self.v_head_dim})"
        parts = [_SEEN[self.mask]]
        if self.mask is MaskKind.RANGE and self.intervals > 1:
            parts = [f"a mask by which each query sees up to {self.intervals} intervals of keys"]
        marks = {
            "keys that lie one by one": self.scattered,
            "padding": self.padded,
            "softcap": self.softcap,
            "a gradient of lse": self.lse_gradient,
            "the same bits every time": self.deterministic,
            "the same bits with any number of heads": self.any_heads,
        }
        parts += [words for words, asked in marks.items() if asked]
        return (
            f"the {self.direction} pass on {where} in {str(self.dtype).removeprefix('torch.')}, "
            f"{self.num_heads} heads of {dims}, {self.num_kv_heads} KV heads, with "
            f"{', '.join(parts)}"
        )


@dataclass(frozen=True, slots=True)
class BackwardNeeds:
    """What a backward pass must be given: the runtime makes it, once for blocks that share rows.

    What is not asked for is given as the plan has it: `out` or `delta` may then be None, not both.
    """

    out: bool = False  # where only delta is known, a stand-in whose row sums with dO are delta
    delta: bool = False
    finite_lse: bool = False  # contiguous, and for unseen rows a number for which exp(x - lse) = 0


@dataclass(frozen=True, slots=True)
class BlockSize:
    """One block of one batch element, as far as its memory goes."""

    num_queries: int
    num_keys: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    element_bytes: int
    accumulate_bytes: int

    def result_bytes(self, direction: Direction, element_bytes: int) -> int:
        """Of (out, lse), or of (dq, dk, dv)."""
        rows, keys = self.num_queries * self.num_heads, self.num_keys * self.num_kv_heads
        if direction is Direction.FORWARD:
            return rows * (self.v_head_dim * element_bytes + self.accumulate_bytes)
        return (rows * self.head_dim + keys * (self.head_dim + self.v_head_dim)) * element_bytes


class Kernel(Protocol):
    """Attention on one block. Results may be in a wider dtype than the inputs.

    A kernel may have more attributes; without one it is not asked for what the attribute says.

    has_softcap     True: it heeds `Block.softcap`
    takes_unions    True: it takes row ranges of several intervals
    deterministic   True: it gives the same bits every time where `Block.deterministic` asks for
                    them; "forward" or "backward": only that pass does
    any_heads       True: the bits of a head do not depend on how many heads a call has
    slow_for(request)   a line that says why it is far slower than kernels behind it in the table:
                    it is then chosen by name, or where no other can do the request
    prepare(direction, block)   makes what it needs of a mask, and may wait for the device. Called
                    ahead of a block's first call where there is time; tensors hold nothing yet
    """

    @property
    def name(self) -> str: ...

    @property
    def backward_needs(self) -> BackwardNeeds | None:
        """None if the kernel has a forward pass only; `backward` is then never called."""
        ...

    def refuses(self, request: Request) -> str | None:
        """None if the kernel can do it, otherwise one line that says why not."""
        ...

    def scratch_bytes(self, direction: Direction, block: BlockSize) -> int:
        """What a call holds at most besides the tensors it is given, as far as it is known: its
        results, and what it or its library takes for itself."""
        ...

    def forward(self, block: Block) -> tuple[Tensor, Tensor]:
        """(out_BSHE, lse_BHS). A row that sees no key gives out = 0 and lse = -inf.

        lse is the natural log-sum-exp of the scaled scores, fp32 (fp64 for fp64 input).
        """
        ...

    def backward(self, block: Block, inputs: BackwardInputs, /) -> tuple[Tensor, Tensor, Tensor]:
        """(dq, dk, dv) that this block contributes; exact zeros for a row that saw no key."""
        ...


class KernelResultError(MeshAttentionError):
    """A kernel did not return what it is to return."""


class CheckedCall:
    """A pass of a kernel on one block, with a look at its results: wrong shapes would be spread
    over the rows by broadcasting, and a log-sum-exp in half precision makes a merge wrong without a
    word. What they must be is worked out once."""

    def __init__(self, kernel: Kernel, direction: Direction, block: Block) -> None:
        self._kernel, self._direction, self._block = kernel, direction, block
        self._compute: Any = getattr(kernel, direction)
        q, k, v = block.q, block.k, block.v
        B, S, H, _ = q.shape
        wide = {accumulator_dtype(q.dtype), torch.float64}
        narrow = {q.dtype, *wide}
        self._expected: dict[str, tuple[tuple[int, ...], set[torch.dtype]]] = {
            "dq": (tuple(q.shape), narrow),
            "dk": (tuple(k.shape), narrow),
            "dv": (tuple(v.shape), narrow),
        }
        if direction is Direction.FORWARD:
            self._expected = {"out": ((B, S, H, v.shape[3]), narrow), "lse": ((B, H, S), wide)}

    def __call__(self, *inputs: BackwardInputs) -> tuple[Tensor, ...]:
        result: tuple[Tensor, ...] = self._compute(self._block, *inputs)
        if not isinstance(result, tuple | list) or len(result) != len(self._expected):
            raise self._error(f", not {_described(result)}")
        device = self._block.q.device
        for (name, (shape, dtypes)), x in zip(self._expected.items(), result, strict=True):
            if not isinstance(x, Tensor) or x.shape != shape or x.device != device:
                raise self._error(f" on {device}; its {name} is {_described(x)}")
            if x.dtype not in dtypes:
                known = " or ".join(sorted(map(str, dtypes)))
                raise self._error(f"; its {name} is {x.dtype}, and must be {known}")
        return result

    def _error(self, fault: str) -> KernelResultError:
        q, k, v = self._block[:3]
        shapes = ", ".join(f"{name} {shape}" for name, (shape, _) in self._expected.items())
        return KernelResultError(
            f"kernel {self._kernel.name!r}: {self._direction} of a block with q {tuple(q.shape)}, "
            f"k {tuple(k.shape)}, v {tuple(v.shape)} in {q.dtype} must return ({shapes}){fault}"
        )


def _described(x: Any) -> str:
    if isinstance(x, Tensor):
        return f"a tensor {tuple(x.shape)} in {x.dtype} on {x.device}"
    if isinstance(x, tuple | list):
        return f"{len(x)} values ({', '.join(map(_described, x))})"
    return type(x).__name__
