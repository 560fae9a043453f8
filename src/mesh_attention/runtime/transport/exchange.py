"""Exchanges: tensors that travel between ranks at the same time, in few messages and few calls.

`runs_of` (`piece_runs.py`) works out once for an operation which pieces go to which member. With
its tensor a run becomes `Messages`, which an `Exchange` makes ready to begin. In an exchange of
tokens for heads several small pieces go between the same two ranks; they are packed into one
message. So the host's time for an exchange grows with the number of runs and the number of ranks,
and not with their product. What follows from shapes alone is worked out when the first tensors
come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from math import prod
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from mesh_attention.runtime.transport.interface import View
from mesh_attention.runtime.transport.piece_runs import PieceRun

Works = list[Any]
LaterCopies = list[Callable[[], object]]
Begin = Callable[[Works, LaterCopies], None]
SMALL_BYTES = 2 << 20  # larger tensors travel by themselves: to copy them would take longer
_ALIGNED = 16  # bytes, so that a packed tensor of any dtype begins where its elements may
_DIMS = {"rows": 0, "heads": 2}
_Part = tuple[Tensor, int, int]  # goes to this rank, or comes from it, with this tag


class Messages(NamedTuple):
    """Equal tensors to these ranks, or from them: as a `PieceRun`, of which `tensor` (rows, batch,
    heads, width) is the piece."""

    tensor: Tensor
    ranks: tuple[int, ...]
    apart: Literal["rows", "heads"] | None
    tag: int
    sent: bool

    @property
    def part_shape(self) -> tuple[int, ...]:
        shape, count = list(self.tensor.shape), len(self.ranks)
        if self.apart is not None:
            shape[_DIMS[self.apart]] //= count
        return tuple(shape)

    @property
    def part_bytes(self) -> int:
        return prod(self.part_shape) * self.tensor.itemsize

    @property
    def parts(self) -> Sequence[Tensor]:
        """The tensor for each rank."""
        if self.apart is None or len(self.ranks) == 1:
            return [self.tensor] * len(self.ranks)
        return self.tensor.chunk(len(self.ranks), _DIMS[self.apart])

    @property
    def by_rank(self) -> Tensor:
        """The same as one tensor, with the ranks in its first dimension."""
        strides, shape = self.tensor.stride(), self.part_shape
        dim = None if self.apart is None else _DIMS[self.apart]
        step = 0 if dim is None else shape[dim] * strides[dim]
        return self.tensor.as_strided((len(self.ranks), *shape), (step, *strides))

    @property
    def lie_alone(self) -> bool:
        """Whether each part is contiguous."""
        split = self.apart == "heads" and len(self.ranks) > 1 and prod(self.tensor.shape[:2]) > 1
        return not split and self.tensor.is_contiguous()


class _Bundle(NamedTuple):
    """Messages that are packed together, by their places, or one message that travels alone, to
    these ranks with this tag."""

    places: tuple[int, ...]
    sent: bool
    pack: PackLayout | None
    as_it_lies: bool
    ranks: tuple[int, ...] = ()
    tag: int = 0

    def tensors(self, messages: Sequence[Messages]) -> Sequence[Tensor]:
        """Of a pack what belongs in it, or comes out of it; else those that travel."""
        if self.pack is not None:
            return self.pack.contents(messages)
        (alone,) = messages
        return alone.parts if self.as_it_lies else [alone.by_rank]


_Bound = Sequence[tuple[_Bundle, Sequence[Tensor]]]  # each with its tensors


class Exchange:
    """Messages that travel together; those of a rank to itself are copied. `host_driven`: the group
    is over gloo. `pack`: small messages between two ranks become one."""

    def __init__(self, group: dist.ProcessGroup, *, host_driven: bool, pack: bool = False) -> None:
        self._group, self._on_host, self._pack = group, host_driven, pack
        self._me = dist.get_rank()
        self._bundles: list[_Bundle] = []
        self._places: dict[int, int] = {}  # in the group, by which gloo names ranks
        if host_driven:
            self._places = {r: i for i, r in enumerate(dist.get_process_group_ranks(group))}

    def bound(self, runs: Sequence[PieceRun], view: View) -> Begin:
        """Makes the runs of an operation ready. Their tensors in the workspace are looked up once,
        and kept by `view`, if it can (`Views`); the caller's are others in each call."""
        kept: dict[Any, list[Sequence[Tensor] | None]] = getattr(view, "kept", {})
        tensors = kept.get(self)
        if tensors is None:
            messages = [Messages(view(run.piece), *run[1:]) for run in runs]
            begin, passed = self.ready(messages), getattr(view, "passed", ())
            kept[self] = [
                None
                if any(runs[at].piece.buffer in passed for at in bundle.places)
                else bundle.tensors([messages[at] for at in bundle.places])
                for bundle in self._bundles
            ]
            return begin
        bound = []
        for bundle, there in zip(self._bundles, tensors, strict=True):
            if there is None:
                its_runs = [runs[at] for at in bundle.places]
                there = bundle.tensors([Messages(view(run.piece), *run[1:]) for run in its_runs])
            bound.append((bundle, there))
        return partial(self._begin, bound)

    def ready(self, messages: Sequence[Messages]) -> Begin:
        """Makes messages ready, which are in the order of their tags. Those of later calls are like
        the first, but for their tensors."""
        self._bundles = self._bundles or [*self._bundles_of(messages)]
        bound = [(b, b.tensors([messages[at] for at in b.places])) for b in self._bundles]
        if not all(bundle.as_it_lies for bundle in self._bundles):
            return partial(self._begin, bound)
        post, own = self._posts(bound, [])  # once for all calls

        def begin(works: Works, finish: LaterCopies) -> None:
            works += post()
            copy_all(own)

        return begin

    def _begin(self, bound: _Bound, works: Works, finish: LaterCopies) -> None:
        post, own = self._posts(bound, finish)
        works += post()
        copy_all(own)

    def _posts(
        self, bound: _Bound, finish: LaterCopies
    ) -> tuple[Callable[[], Works], list[tuple[Tensor, Tensor]]]:
        """What posts them, and the copies of what stays on this rank."""
        posted: dict[bool, list[_Part]] = {False: [], True: []}  # by whether they are sent
        own: dict[bool, dict[int, Tensor]] = {False: {}, True: {}}  # by tag
        for bundle, tensors in bound:
            if bundle.pack is not None:
                parts = bundle.pack.packed(tensors, finish)
            else:
                if not bundle.as_it_lies:
                    tensors = _copy(tensors[0], finish, sent=bundle.sent, on_host=self._on_host)
                parts = [(x, r, bundle.tag) for x, r in zip(tensors, bundle.ranks, strict=True)]
            for x, rank, tag in parts:
                if rank == self._me:
                    own[bundle.sent][tag] = x
                else:
                    posted[bundle.sent].append((x, rank, tag))
        kept = [(x, own[True][tag]) for tag, x in own[False].items()]
        # Receives first: gloo sends once it hears that the other side receives, and would hear it
        # behind all that the other side sends itself. NCCL goes by the order between two ranks.
        group, places = self._group, self._places
        if self._on_host:  # as `isend` and `irecv`, which look at their arguments again each time
            calls: list[tuple[Any, list[Tensor], int, int]]
            calls = [(group.recv, [x], places[rank], tag) for x, rank, tag in posted[False]]
            calls += [(group.send, [x], places[rank], tag) for x, rank, tag in posted[True]]
            return lambda: [call(x, place, tag) for call, x, place, tag in calls], kept
        together = [dist.P2POp(dist.irecv, x, rank, group, tag) for x, rank, tag in posted[False]]
        together += [dist.P2POp(dist.isend, x, rank, group, tag) for x, rank, tag in posted[True]]
        return lambda: dist.batch_isend_irecv(together) if together else [], kept

    def _bundles_of(self, messages: Sequence[Messages]) -> Iterator[_Bundle]:
        """What is packed together, and each other message alone: gloo's point-to-point reads host
        memory only. On both sides of a pair of ranks what is small comes first."""
        small: dict[bool, list[int]] = {False: [], True: []}  # by whether they are sent
        large: dict[bool, list[int]] = {False: [], True: []}
        for at, x in enumerate(messages):
            (small if self._pack and x.part_bytes <= SMALL_BYTES else large)[x.sent].append(at)
        ranks = [[r for at in places for r in messages[at].ranks] for places in small.values()]
        # Both ways or none: what a rank has for itself then lies alike on both sides.
        packs = any(len(several) > len({*several}) for several in ranks)
        for sent in (False, True):
            if packs and small[sent]:
                layout = PackLayout([messages[at] for at in small[sent]], on_host=self._on_host)
                yield _Bundle(tuple(small[sent]), sent, layout, as_it_lies=False)
            for at in (*([] if packs else small[sent]), *large[sent]):
                x = messages[at]
                as_it_lies = x.lie_alone and not (self._on_host and x.tensor.is_cuda)
                yield _Bundle((at,), sent, None, as_it_lies, x.ranks, x.tag)


def _copy(x: Tensor, finish: LaterCopies, *, sent: bool, on_host: bool) -> Sequence[Tensor]:
    """Tensors that can travel in place of those that cannot."""
    copy = torch.empty(x.shape, dtype=x.dtype, device="cpu" if on_host else x.device)
    if sent:
        copy.copy_(x)
    else:
        finish.append(partial(x.copy_, copy))
    return copy.unbind()


class _Place(NamedTuple):
    """Where the parts of a tensor lie in a pack of its dtype. Often one view serves: all parts
    begin at the same element of their rows, and these follow each other. Else each part has its
    own view."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    starts: tuple[int, ...]
    is_apart: bool


class PackLayout:
    """Of a pack, which has a message in each row: the place of each tensor, and the messages."""

    def __init__(self, messages: Sequence[Messages], *, on_host: bool) -> None:
        self._sent = messages[0].sent
        self._device = torch.device("cpu") if on_host else messages[0].tensor.device
        row = {rank: at for at, rank in enumerate(sorted({r for x in messages for r in x.ranks}))}
        ends = dict.fromkeys(row, 0)  # where the next part may begin
        tags: dict[int, int] = {}
        stops: dict[int, int] = {}
        starts: list[list[tuple[int, int]]] = []  # rank and byte, of each part of each tensor
        for x in messages:
            starts.append([(rank, ends[rank]) for rank in x.ranks])
            for rank in x.ranks:
                tags.setdefault(rank, x.tag)
                stops[rank] = ends[rank] + x.part_bytes
                ends[rank] = -(-stops[rank] // _ALIGNED) * _ALIGNED
        width = max(ends.values())
        self._num_bytes = width * len(row)
        self._messages = [(r, row[r] * width, stops[r], tags[r]) for r in row]
        self._places = [
            _place_in(x, [row[rank] * width + start for rank, start in at], width)
            for x, at in zip(messages, starts, strict=True)
        ]
        self._dtypes = {place.dtype for place in self._places}

    def contents(self, messages: Sequence[Messages]) -> list[Tensor]:
        """Tensors for which each place has a view, in few views."""
        pairs = zip(messages, self._places, strict=True)
        return [x for of, place in pairs for x in (of.parts if place.is_apart else (of.by_rank,))]

    def packed(self, contents: Sequence[Tensor], finish: LaterCopies) -> list[_Part]:
        pack = torch.empty(self._num_bytes, dtype=torch.uint8, device=self._device)
        typed = {dtype: pack.view(dtype) for dtype in self._dtypes}
        there = [
            typed[place.dtype].as_strided(place.shape, place.strides, start)
            for place in self._places
            for start in place.starts
        ]
        if self._sent:
            copy_all([*zip(there, contents, strict=True)])
        else:
            finish.append(partial(copy_all, [*zip(contents, there, strict=True)]))
        return [
            (pack.as_strided((size,), (1,), start), rank, tag)
            for rank, start, size, tag in self._messages
        ]


def _place_in(x: Messages, starts: Sequence[int], width: int) -> _Place:
    """`starts`: of each part, in bytes; `width`: of a row."""
    shape, size = x.part_shape, x.tensor.itemsize
    strides = tuple([prod(shape[at + 1 :]) for at in range(len(shape))])
    first = [start // size for start in starts]
    steps = {b - a for a, b in pairwise(starts)}
    if steps <= {width}:
        step = width // size
        return _Place(x.tensor.dtype, (len(first), *shape), (step, *strides), (first[0],), False)
    return _Place(x.tensor.dtype, shape, strides, tuple(first), True)


def copy_all(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """(target, source); in one launch where they lie alike."""
    alike: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in pairs:
        if target.is_contiguous() and source.is_contiguous() and target.device == source.device:
            targets, sources = alike.setdefault(target.dtype, ([], []))
            targets.append(target)
            sources.append(source)
        else:
            target.copy_(source)
    for targets, sources in alike.values():
        torch._foreach_copy_(targets, sources)
