"""The options of methods: each is declared once, with its help and its default.

A setting is a frozen dataclass; its fields are the options. Flags of the command line, their help,
`docs/methods.md` and validation are all made from the fields, so a new option touches nothing but
its setting. Options of a single method are declared beside its builder; `table.py` lists the
setting of each method, and builders read it.

`Keep` says which rows a forward pass keeps for the backward pass, which fetches all other queries,
keys and values from the shards again. Rows that were exchanged for heads are kept in place of the
caller's shards: if the number of ranks in the exchange divides the number of heads, they are as
large as the shards, and need no more memory. Rows that were gathered are kept besides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from functools import cache, partial
from inspect import get_annotations
from types import NoneType, UnionType
from typing import Any, get_args, get_origin

from mesh_attention.errors import PlanError
from mesh_attention.plan.language.buffers import Kind
from mesh_attention.plan.methods.parts.chunks import HeadSlices
from mesh_attention.plan.methods.parts.reduce import Combine
from mesh_attention.plan.methods.parts.rotate import GradientRoute
from mesh_attention.plan.problem.arguments import choice, flag, number, pair, real
from mesh_attention.plan.problem.layout import LayoutKind, Stretches, read_stretches
from mesh_attention.plan.problem.problem import Problem


def option(default: Any, help: str, metavar: str = "N") -> Any:
    """A field of a setting: `help` is what people read, `metavar` how its value is written."""
    return field(default=default, metadata={"help": help, "metavar": metavar})


@dataclass(frozen=True)
class Option:
    """A field of a setting, as the command line, the docs and validation read it."""

    name: str
    type: Any  # bool, int, float, a pair of int, a StrEnum, or a type that no flag can write
    default: Any
    help: str
    metavar: str

    @property
    def has_text(self) -> bool:
        """Whether people can write it on a command line."""
        if get_origin(self.type) is tuple:
            return bool(self.type != Stretches)
        return self.type in (bool, int, float) or issubclass(self.type, StrEnum)

    def read(self, value: Any) -> Any:
        """Returns the value in the declared type, or raises an error that names the option. None is
        allowed only where it is the default."""
        if value is None and self.default is None:
            return None
        if self.type == Stretches:
            return read_stretches(value)
        if get_origin(self.type) is tuple:
            return pair(self.name, value)
        simple = {bool: flag, int: number, float: real}.get(self.type)
        if simple is not None:
            return simple(self.name, value)  # type: ignore[operator]
        if issubclass(self.type, StrEnum):
            return choice(self.type, self.name, value)
        if not isinstance(value, self.type):
            raise PlanError(f"{self.name}={value!r}: must be a {self.type.__name__}")
        return value


_own_kinds = cache(partial(get_annotations, eval_str=True))  # settings share their bases


@cache  # every question of a batch asks for them
def options_of(setting: type[Setting]) -> Mapping[str, Option]:
    """The options of a setting, by name.

    >>> [*options_of(Setting)]
    ['layout', 'stripe_block', 'stretches', 'relayout', 'one_call', 'gather_out', 'keep', \
'layers', 'ranks_per_node']
    """
    bases, options = reversed(setting.__mro__), dict[str, Option]()
    kinds = {name: kind for base in bases for name, kind in _own_kinds(base).items()}
    for f in fields(setting):
        kind = kinds[f.name]
        members = get_args(kind) if isinstance(kind, UnionType) else (kind,)
        declared = next(member for member in members if member is not NoneType)
        words = f.metadata["help"], f.metadata["metavar"]
        options[f.name] = Option(f.name, declared, f.default, *words)
    return options


class Keep(StrEnum):
    """What the forward pass keeps at most; rows that go round a ring are never kept."""

    AUTO = "auto"  # exchanged rows, of the tensors for which they need no more memory
    SHARDS = "shards"
    EXCHANGED = "exchanged"
    GATHERED = "gathered"


def kept_kinds(keep: Keep, problem: Problem, degree: int) -> tuple[Kind, ...]:
    """The tensors whose rows a rank keeps after `degree` ranks exchanged them for heads.

    >>> from mesh_attention.plan.problem.mask import Mask
    >>> few = Problem(64, num_heads=8, num_kv_heads=2, head_dim=8, mask=Mask())
    >>> [" ".join(kept_kinds(Keep.AUTO, few, degree)) for degree in (2, 4)]
    ['q lse k v', 'q lse']
    """
    if keep is Keep.SHARDS:
        return ()
    all_kinds = keep is not Keep.AUTO
    queries = (Kind.Q, Kind.LSE) if all_kinds or problem.num_heads % degree == 0 else ()
    keys = (Kind.K, Kind.V) if all_kinds or problem.kv_heads % degree == 0 else ()
    return (*queries, *keys)


@dataclass(frozen=True)
class Setting:
    """Options of every method; None means: choose for me."""

    layout: LayoutKind | None = option(
        None, "contiguous, zigzag, striped or listed; left out: zigzag under a mask", "NAME"
    )
    stripe_block: int = option(1, "tokens of one stripe")
    stretches: Stretches | None = option(
        None,
        "with layout=listed: the (start, stop) positions of each rank, in the order of its tokens; "
        "only where queries and keys have the same number of tokens",
        "-",
    )
    relayout: bool = option(
        False,
        "your shards are contiguous, rank r has the r-th; in both passes they are exchanged for "
        "the layout that the method works in, and back",
    )
    one_call: bool = option(
        False,
        "every attention is one kernel call by row ranges. With some methods the program then does "
        "not depend on the mask, and serves any",
    )
    gather_out: bool = option(False, "the backward pass sends O, as in the paper, instead of delta")
    keep: Keep = option(
        Keep.AUTO,
        "what of q, k and v is kept for the backward pass: the caller's `shards`; the rows that "
        "were `exchanged` for heads or layout; or all rows that were `gathered`. auto: `exchanged` "
        "where that needs no memory, and `gathered` if `max_memory_bytes` allows it",
        "NAME",
    )
    layers: int = option(
        1, "how many layers keep rows at the same time, for `max_memory_bytes` and searches"
    )
    ranks_per_node: int | None = option(None, "ranks that share a node")


@dataclass(frozen=True)
class CombineSetting(Setting):
    """An option of methods that reduce partial results in groups of ranks."""

    combine: Combine = option(
        Combine.AUTO,
        "how partial results reach their owners: `exchange`; `nodes` (one exchange inside nodes, "
        "one between them); or `reduce-scatter`, which in half precision rounds at every hop",
        "NAME",
    )


@dataclass(frozen=True)
class ShapeSetting(Setting):
    """An option of methods on a tile grid."""

    tile: tuple[int, int] | None = option(
        None,
        "a rank computes A partitions of Q against B of KV; A times B is the number of ranks "
        "divided by `ulysses`; left out: chosen",
        "AxB",
    )


@dataclass(frozen=True)
class TileSetting(ShapeSetting, CombineSetting):
    """Options of methods that reduce partial results on a tile grid."""

    alpha: int | None = option(
        None, "width of the patch of the tile grid that a node holds (needs `ranks_per_node`)"
    )


@dataclass(frozen=True)
class RotationSetting(Setting):
    """An option of methods whose keys rotate."""

    gradients: GradientRoute = option(
        GradientRoute.DIRECT,
        "dK and dV go `direct` to their owner, once from each node, or `travel` with their block",
        "NAME",
    )


@dataclass(frozen=True)
class DegreeSetting(Setting):
    """Options of methods that can run between two exchanges of tokens for heads (Ulysses)."""

    ulysses: int | None = option(
        None,
        "Ulysses degree: groups of U ranks exchange tokens for heads. U divides ranks and heads; "
        "left out: the largest up to 8 (or a node), and 1 for a double ring",
        "U",
    )
    units_per_node: int | None = option(
        None,
        "how many Ulysses groups share each node, with the same number of ranks each: heads are "
        "then exchanged between nodes, and the tile or ring lies more inside them; tokens stay "
        "where they are (needs `ranks_per_node`); left out: the ranks of a group are consecutive",
    )


@dataclass(frozen=True)
class SliceSetting(Setting):
    """Options of methods that fetch what a slice of heads needs while another is computed."""

    head_slices: HeadSlices | None = option(
        None, "KV heads of the first slice of heads, and of the largest", "FIRSTxMOST"
    )
    backward_head_slices: HeadSlices | None = option(
        None, "the same for the backward pass, if it differs", "FIRSTxMOST"
    )


@dataclass(frozen=True)
class ChunkSetting(SliceSetting):
    """Options of methods that also cut the rows of a slice of heads.

    Where neither chunks nor head slices are given, both are chosen by the size of the problem.
    """

    chunks: tuple[int, int] | None = option(
        None,
        "queries of a tile in KQ chunks and keys in KKV, so that communication hides behind "
        "computation: at most 16 in all, 1x1 is uncut. Left out with `head_slices`: chosen by "
        "size. Around Ulysses, queries of one KV head are cut by heads first",
        "KQxKKV",
    )
    backward_chunks: tuple[int, int] | None = option(
        None, "the chunks of the backward pass, if they differ", "KQxKKV"
    )


@dataclass(frozen=True)
class CutSetting(ChunkSetting):
    """Options of methods that gather: chunks, the order of communication, and a cap on memory."""

    gamma: float = option(
        1.05,
        "the greedy scheduler fills a step until it computes for X times its communication",
        "X",
    )
    max_memory_bytes: int | None = option(
        None,
        "cap on the workspace of each pass plus the gathered rows that all `layers` keep; a plan "
        "that cannot keep to it is refused",
        "BYTES",
    )
