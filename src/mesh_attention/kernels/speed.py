"""How fast kernels are, roughly: enough to choose between one call for all and many small ones.

An attention of a plan is either cut into rectangles, full or causal, whose results are merged, or
handed whole to a kernel that takes any mask. Which is faster depends on the kernels that are there,
so both ways are added up, from rates that were measured on an H200 (bf16, heads of 128, large
calls; benchmarks/results has them). Only their proportions matter for the choice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mesh_attention.kernels.interface import BlockSize, Kernel, MaskKind
from mesh_attention.plan.plan import Direction

# Of a kernel that nobody has measured here. Whoever registers one wants it to be used.
_UNKNOWN_TFLOPS = 700.0
_TFLOPS: Mapping[str, Mapping[Direction, tuple[float, float, float]]] = {  # full, causal, range
    "flash_attn4": {Direction.FORWARD: (1200, 1100, 0), Direction.BACKWARD: (900, 850, 0)},
    "flash_attn3": {Direction.FORWARD: (742, 716, 0), Direction.BACKWARD: (600, 560, 0)},
    "cudnn_ranges": {Direction.FORWARD: (0, 0, 692), Direction.BACKWARD: (0, 0, 585)},
    "cudnn": {Direction.FORWARD: (663, 628, 0), Direction.BACKWARD: (557, 577, 0)},
    "triton": {Direction.FORWARD: (530, 520, 520), Direction.BACKWARD: (420, 420, 420)},
    "cuda_flash": {Direction.FORWARD: (390, 360, 0), Direction.BACKWARD: (330, 300, 0)},
    "cpu_flash": {Direction.FORWARD: (30, 30, 0), Direction.BACKWARD: (30, 30, 0)},
    "blockwise": {Direction.FORWARD: (20, 20, 10), Direction.BACKWARD: (20, 20, 10)},
    "reference": {Direction.FORWARD: (2, 2, 1), Direction.BACKWARD: (2, 2, 1)},
}
# These take any mask too, but not at a rate that would make up for the pairs that nobody sees.
_NEVER_WHOLE = frozenset({"blockwise", "reference"})
_GIVE_WAY = frozenset({"flash_attn3", "triton"})  # of the kernels for rectangles, forward
_LEAVE_SMS = frozenset({"flash_attn3"})  # of those, for as long as a call lasts
_CALL_SECONDS = 12e-6  # between the ends of two short calls, their merges included
_BYTES_PER_SECOND = 3.5e12  # of merging
_FULL, _CAUSAL, _RANGE = range(3)
_COLUMN = {MaskKind.FULL: _FULL, MaskKind.CAUSAL: _CAUSAL, MaskKind.RANGE: _RANGE}


def predicted_seconds(
    direction: Direction, calls: Sequence[tuple[Kernel, MaskKind, int, BlockSize]]
) -> float:
    """Of calls one after the other, each with the number of pairs that it sees."""
    return sum(_one_call(direction, *call) for call in calls)


def takes_whole_attentions(kernel: Kernel | None) -> bool:
    """Whether the kernel for row ranges may be asked for more than what no other can do."""
    return kernel is not None and kernel.name not in _NEVER_WHOLE


def lets_transfers_begin(kernels: Mapping[MaskKind, Kernel], direction: Direction) -> bool:
    """Whether a communication can begin in the middle of a long call, by what was measured: some
    kernels hold every multiprocessor until a call is over."""
    kernel = kernels.get(MaskKind.FULL)
    return direction is Direction.FORWARD and kernel is not None and kernel.name in _GIVE_WAY


def leaves_sms(kernels: Mapping[MaskKind, Kernel], direction: Direction) -> bool:
    """Whether full calls heed `Block.leave_sms`, and so are slower to their end."""
    kernel = kernels.get(MaskKind.FULL)
    return direction is Direction.FORWARD and kernel is not None and kernel.name in _LEAVE_SMS


def _one_call(
    direction: Direction, kernel: Kernel, kind: MaskKind, pairs: int, size: BlockSize
) -> float:
    rates = _TFLOPS.get(kernel.name)
    tflops = _UNKNOWN_TFLOPS if rates is None else rates[direction][_COLUMN[kind]]
    D, E = size.head_dim, size.v_head_dim
    products = D + E if direction is Direction.FORWARD else 3 * D + 2 * E
    results = size.result_bytes(direction, size.element_bytes + 2 * size.accumulate_bytes)
    arithmetic = 2 * products * pairs * size.num_heads / (max(tflops, 1.0) * 1e12)
    return _CALL_SECONDS + arithmetic + results / _BYTES_PER_SECOND
