"""What a search may try: shapes, and the cuts of each, the most promising first.

A box exchanges tokens for heads among `degree` ranks, and on the units that this makes a tile a x b
gathers (or rotates) a parts of the queries and b of the keys. How long that takes is known without
a plan, about and at least (`shape_seconds.py`).

A cut is into slices of heads and chunks of rows. Cuts are listed in the order in which they help:
over the questions of `benchmarks/default_against_best.py` the first is within 3 % of the best in
the mean, the first three within 1 %. `search.py` decides which shapes and cuts are tried.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mesh_attention.choose.busiest import degree_and_tile
from mesh_attention.choose.scored import SearchQuestion
from mesh_attention.choose.shape_seconds import ShapeSeconds
from mesh_attention.cost.planning import default_layout
from mesh_attention.plan.language.plan import Direction
from mesh_attention.plan.methods.needed_rows import usual_layout
from mesh_attention.plan.methods.table import METHODS
from mesh_attention.plan.problem.layout import LayoutKind

_CUTS = ("chunks", "head_slices", "even_chunks", "short_start")


@dataclass(frozen=True)
class Shape:
    """A method and the options that are not about cuts. A rank has `held` KV heads. Transfers one
    by one take `moving_seconds`, with the latency of each if nothing is cut."""

    name: str  # of the method
    options: dict[str, Any]
    degree: int
    tile: tuple[int, int]
    held: int
    least_seconds: float
    moving_seconds: float

    @property
    def key(self) -> str:
        return shape_key(self.name, self.options)

    @property
    def box(self) -> str:
        """A key that is the same for shapes whose programs are the same in other words, and where
        only the patches in which ranks lie on nodes have another width."""
        method = METHODS[self.name]
        if not (method.is_plain_box or method.by_stretches):
            return setting_key(self.name, self.options)
        names = ("tile", "ulysses", "alpha")
        rest = sorted((k, v) for k, v in self.options.items() if k not in names)
        rotates = method.rotates and self.tile != (1, 1)
        return f"{method.by_stretches} {self.degree} {self.tile} {rotates} {rest}"

    @property
    def promise(self) -> tuple[float, float]:
        """About how long it takes in four parts, where the longer of attention and transfers hides
        all but a quarter of the shorter; among equals, what there is to hide. The least is best."""
        shorter, longer = sorted((self.least_seconds, self.moving_seconds))
        return longer + shorter / 4, self.moving_seconds


def setting_key(method: str, options: Mapping[str, Any]) -> str:
    return f"{method} {sorted(options.items(), key=str)}"


def shape_key(method: str, options: Mapping[str, Any]) -> str:
    """A key of all that is not about cuts."""
    rest = ((k, str(v)) for k, v in options.items() if k.removeprefix("backward_") not in _CUTS)
    return f"{method} {sorted(rest)}"


def shapes_of(
    asked: SearchQuestion, direction: Direction, layout: LayoutKind | None
) -> list[Shape]:
    """The shapes of all methods asked for, the most promising first. `layout` becomes an option
    where it is not the method's own."""
    problem, num_ranks, options = asked.problem, asked.num_ranks, asked.options
    seconds = ShapeSeconds(problem, num_ranks, asked.cluster, direction)
    shapes: dict[str, Shape] = {}
    for name in asked.methods:
        method, said = METHODS[name], dict(options)
        by_rows = method.by_stretches
        own_layout = usual_layout(problem.mask) if by_rows else default_layout(problem)
        if layout is not None and layout is not own_layout:
            said["layout"] = layout.value
        candidates = [
            candidate
            for candidate in method.candidates(problem, num_ranks, asked.cluster.node.ranks)
            if all(options.get(option) in (None, x) for option, x in candidate.items())
        ]
        for candidate in candidates or [{}]:
            setting = candidate | said
            degree, tile = degree_and_tile(name, setting, problem, num_ranks)
            held = max(1, problem.kv_heads // degree)
            times = seconds.least_and_moving(name, setting, layout or own_layout, degree, tile)
            shapes[setting_key(name, setting)] = Shape(name, setting, degree, tile, held, *times)
    return sorted(shapes.values(), key=lambda shape: (shape.promise, len(shape.options)))


_CUT_OPTIONS = ("chunks", "head_slices")
_Chunks = tuple[int, int]  # of queries and of keys
_Parts = tuple[_Chunks, int, int]  # chunks, slices of heads, and largest over first slice


def _parts(text: str) -> tuple[_Parts, ...]:
    """Reads words of the form CHUNKS/SLICES:LARGEST, where /1:1 and :1 are left out.

    >>> _parts("2x2 1x2/4 1x1/8:4")
    (((2, 2), 1, 1), ((1, 2), 4, 1), ((1, 1), 8, 4))
    """
    parts = []
    for word in text.split():
        chunks, _, rest = word.partition("/")
        slices, _, largest = rest.partition(":")
        kq, kkv = map(int, chunks.split("x"))
        parts.append(((kq, kkv), int(slices or 1), int(largest or 1)))
    return tuple(parts)


_GATHERED = {
    Direction.FORWARD: _parts(
        "2x2/2 1x2/2:4 1x1/8:4 2x2 1x1 2x1/4:4 2x2/2:2 1x1/2 2x1/2 1x2/4:4 1x2/4 2x1/2:4"
    ),
    Direction.BACKWARD: _parts(
        "2x2/2 2x1/2:4 1x2/4 2x1/2 1x1/8:4 2x4/2 2x1/4:4 1x2/2:4 1x1/2 2x2/2:2 1x1"
    ),
}
_EXCHANGED = _parts("1x1/2 2x4/2 1x1/4 1x1/4:4 1x1/2:2 1x2/2 2x2/2 1x1 1x1/8")
_ONE_HEAD = _parts("2x2 2x4 1x1 1x2 4x1 4x2 2x1 1x4")
_QUERIES_ALONE = _parts("2x1 1x1 4x1")
_WHOLE_ROWS = _parts("1x1 1x1/2 1x1/4:4 1x1/4 1x1/2:4 1x1/8:4")

# Seconds that a shape takes. Of less, cuts cost more in launches and latency than they hide: few
# parts are tried first, or none at all.
_SHORT, _TINY = 1e-3, 1e-4


def _num_parts(parts: _Parts) -> int:
    (kq, kkv), slices, _ = parts
    return kq * kkv * slices


def cuts_of(shape: Shape, direction: Direction, *, sparse: bool) -> Iterator[dict[str, Any]]:
    """The options of each cut. If the caller's options name a cut, there is no other. `sparse`: the
    mask shows little, so that chunks of keys are of unlike work."""
    known, said = METHODS[shape.name].options(), shape.options
    free = [name for name in _CUT_OPTIONS if name in known]
    if not free or any(name.removeprefix("backward_") in _CUT_OPTIONS for name in said):
        yield {}
        return
    rotates = METHODS[shape.name].rotates and shape.tile != (1, 1)
    if "chunks" not in free:
        parts = _WHOLE_ROWS
    elif shape.held == 1:
        parts = _ONE_HEAD
        if rotates or sparse:
            parts = tuple(dict.fromkeys((*_QUERIES_ALONE, *(() if rotates else _ONE_HEAD))))
    else:
        gathers = shape.tile != (1, 1) and not rotates
        parts = _GATHERED[direction] if gathers else _EXCHANGED
    seconds, _ = shape.promise
    if seconds < _SHORT:
        parts = tuple(sorted(parts, key=_num_parts))
    if seconds < _TINY:
        parts = (((1, 1), 1, 1),)
    # Forward the whole of one head is exchanged before there is something to compute.
    starts_short = direction is Direction.FORWARD and parts is _ONE_HEAD and shape.degree > 1
    starts_short = starts_short and "short_start" in known and "short_start" not in said
    seen = []
    for chunks, slices, first in parts:
        cut: dict[str, Any] = {"chunks": chunks} if "chunks" in free else {}
        if slices > 1:
            most = shape.held // slices
            if most < 1:
                continue
            cut["head_slices"] = (max(1, most // first), most)
        if starts_short and chunks[1] > 1:
            cut["short_start"] = True
        if cut not in seen:
            seen.append(cut)
            yield cut


def coarser_and_finer(chunks: _Chunks) -> list[tuple[_Chunks | None, _Chunks]]:
    """Pairs of neighbours, with half and with twice as many chunks, for each side.

    >>> coarser_and_finer((1, 2))
    [(None, (2, 2)), ((1, 1), (1, 4))]
    """
    q, kv = chunks
    return [
        ((q // 2, kv) if q > 1 else None, (2 * q, kv)),
        ((q, kv // 2) if kv > 1 else None, (q, 2 * kv)),
    ]


def variants_of(
    setting: Mapping[str, Any], shape: Shape, *, even: bool
) -> Iterator[dict[str, Any]]:
    """The same setting with a short first chunk of keys, and with chunks of even work. `even`: the
    mask gives ranks chunks of unlike work."""
    known = METHODS[shape.name].options()
    kq, kkv = setting.get("chunks") or (1, 1)
    if shape.degree == 1:  # both are about what is exchanged for heads
        return
    if "short_start" in known and "short_start" not in setting and kkv > 1:
        yield {**setting, "short_start": True}
    if "even_chunks" in known and even and "even_chunks" not in setting and kq * kkv > 1:
        yield {**setting, "even_chunks": True}
