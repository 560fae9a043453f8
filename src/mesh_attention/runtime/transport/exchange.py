"""Exchanges: tensors that travel between ranks at the same time, in few messages and few calls.

`runs_of` works out once for an operation which pieces go to which member. Equal pieces of several
members that lie side by side, in heads or in rows, are one `PieceRun`, and so is a piece that goes
to several members: one view, one copy and one split serve all these members. With its tensors a run
becomes `Messages`, which `exchange` makes ready to begin. In an exchange of tokens for heads
several small pieces go between the same two ranks; they are packed into one message. So the host's
time for an exchange grows with the number of runs and the number of ranks, and not with their
product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from itertools import repeat
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from mesh_attention.plan.language.buffers import Piece
from mesh_attention.runtime.transport.interface import Transfers, View

Works = list[Any]
LaterCopies = list[Callable[[], object]]
Begin = Callable[[Works, LaterCopies], None]
SMALL_BYTES = 2 << 20  # larger tensors travel by themselves: to copy them would take longer
_ALIGNED = 16  # bytes, so that a packed tensor of any dtype begins where its elements may


class PieceRun(NamedTuple):
    """`piece` consists of equal pieces, one for each of these ranks, in this order, side by side in
    rows or in heads; or, with `apart` None, all of it is for each. `tag`: the number of these
    pieces between two ranks, the same on both sides. `sent`: they are sent, and not received."""

    piece: Piece
    ranks: tuple[int, ...]
    apart: Literal["rows", "heads"] | None
    tag: int
    sent: bool

    def messages(self, view: View) -> Messages:
        """On tensors."""
        x, count = view(self.piece), len(self.ranks)
        rows, batch, heads, width = x.shape
        if self.apart is None:
            x = x.expand(count, rows, batch, heads, width)
        elif self.apart == "heads":
            x = x.view(rows, batch, count, heads // count, width).movedim(2, 0)
        else:
            x = x.view(count, rows // count, batch, heads, width)
        return Messages(x, self.ranks, self.tag, self.sent)


def runs_of(moved: Transfers, ranks: Sequence[int]) -> tuple[PieceRun, ...]:
    """The runs of all that a member sends and receives, itself included. `ranks`: the global ranks
    of all members of the group."""
    single = [
        PieceRun(piece, (ranks[member],), None, tag, sent)
        for sent, by_member in ((False, moved.receives), (True, moved.sends))
        for member, pieces in enumerate(by_member)
        for tag, piece in enumerate(pieces)
    ]
    runs: list[PieceRun] = []
    for run in sorted(single, key=_place):
        joined = _join(runs[-1], run) if runs else None
        if joined is None:
            runs.append(run)
        else:
            runs[-1] = joined
    return tuple(runs)


def _place(run: PieceRun) -> tuple[Any, ...]:
    piece = run.piece
    return run.sent, run.tag, piece.buffer, piece.start, piece.heads or ()


def _join(first: PieceRun, second: PieceRun) -> PieceRun | None:
    """None if they are no neighbours, or not of equal size."""
    a, b, count = first.piece, second.piece, len(first.ranks)
    if (first.sent, first.tag, a.buffer) != (second.sent, second.tag, b.buffer):
        return None
    apart: Literal["rows", "heads"] | None = None
    piece = a
    if (a.start, a.stop) == (b.start, b.stop) and a.heads and b.heads and a != b:
        width = b.heads[1] - b.heads[0]
        if a.heads[1] != b.heads[0] or a.heads[1] - a.heads[0] != count * width:
            return None
        apart, piece = "heads", replace(a, heads=(a.heads[0], b.heads[1]))
    elif a != b:
        rows = b.stop - b.start
        if a.heads != b.heads or a.stop != b.start or a.stop - a.start != count * rows:
            return None
        apart, piece = "rows", replace(a, stop=b.stop)
    if count > 1 and apart != first.apart:
        return None
    return PieceRun(piece, (*first.ranks, *second.ranks), apart, first.tag, first.sent)


class Messages(NamedTuple):
    """Equal tensors to these ranks, or from them, one rank after the other in the first dimension.
    `tag`: as in `PieceRun`."""

    tensor: Tensor
    ranks: tuple[int, ...]
    tag: int
    sent: bool

    @property
    def part_bytes(self) -> int:
        return self.tensor.nbytes // len(self.ranks)


def exchange(
    messages: Sequence[Messages], group: dist.ProcessGroup, *, host_driven: bool, pack: bool = False
) -> Begin:
    """Makes messages ready that travel together; those of a rank to itself are copied. They are in
    the order of their tags. `host_driven`: the group is over gloo. `pack`: small messages between
    two ranks become one."""
    me, bundles = dist.get_rank(), _bundles(messages, pack=pack, on_host=host_driven)

    def post(finish: LaterCopies) -> tuple[list[dist.P2POp], list[tuple[Tensor, Tensor]]]:
        posted: dict[bool, list[dist.P2POp]] = {False: [], True: []}  # by whether they are sent
        own: dict[bool, dict[int, Tensor]] = {False: {}, True: {}}  # by tag
        for bundle, as_it_lies in bundles:
            first, sent = bundle[0], bundle[0].sent
            call = dist.isend if sent else dist.irecv
            parts: Iterable[_Part]
            if len(bundle) > 1:
                parts = _packed(bundle, me, finish, on_host=host_driven)
            else:
                whole = first.tensor if as_it_lies else _copy(first, finish, on_host=host_driven)
                parts = zip(whole.unbind(), first.ranks, repeat(first.tag))
            for x, rank, tag in parts:
                if rank == me:
                    own[sent][tag] = x
                else:
                    posted[sent].append(dist.P2POp(call, x, rank, group, tag))
        # Receives first: gloo sends once it hears that the other side receives, and would hear it
        # behind all that the other side sends itself. NCCL goes by the order between two ranks.
        return posted[False] + posted[True], [(x, own[True][tag]) for tag, x in own[False].items()]

    ready = post([]) if all(as_it_lies for _, as_it_lies in bundles) else None

    def begin(works: Works, finish: LaterCopies) -> None:
        posted, own = ready or post(finish)
        if posted:
            works += dist.batch_isend_irecv(posted)
        copy_all(own)

    return begin


_Part = tuple[Tensor, int, int]  # goes to this rank, or comes from it, with this tag


def _bundles(
    messages: Sequence[Messages], *, pack: bool, on_host: bool
) -> list[tuple[list[Messages], bool]]:
    """What is packed together, and each other message alone, with whether it can travel as it lies:
    gloo's point-to-point reads host memory only. On both sides of a pair of ranks what is small
    comes first."""
    bundles: list[tuple[list[Messages], bool]] = []
    for sent in (False, True):
        small: list[Messages] = []
        large: list[Messages] = []
        for x in messages:
            if x.sent == sent:
                (small if pack and x.part_bytes <= SMALL_BYTES else large).append(x)
        ranks = [rank for x in small for rank in x.ranks]
        if len(ranks) > len({*ranks}):
            bundles.append((small, False))
            small = []
        for x in small + large:
            as_it_lies = x.tensor[0].is_contiguous() and not (on_host and x.tensor.is_cuda)
            bundles.append(([x], as_it_lies))
    return bundles


def _copy(message: Messages, finish: LaterCopies, *, on_host: bool) -> Tensor:
    """A tensor that can travel in place of the one that cannot."""
    x = message.tensor
    copy = torch.empty(x.shape, dtype=x.dtype, device="cpu" if on_host else x.device)
    if message.sent:
        copy.copy_(x)
    else:
        finish.append(partial(x.copy_, copy))
    return copy


class _Place(NamedTuple):
    """Where the parts of a tensor lie in a pack, which has a message in each row. Often one view
    serves: all parts begin at byte `start` of `rows`, in the order of the tensor or in the opposite
    order. Else `rows` is None, and `by_part` has the row and the first byte of each part."""

    rows: slice | None
    start: int
    opposite: bool
    by_part: tuple[tuple[int, int], ...]

    def pairs(self, tensor: Tensor, pack: Tensor) -> list[tuple[Tensor, Tensor]]:
        """(view of the pack, what belongs there), in few views."""
        size = tensor.nbytes // tensor.shape[0]
        if self.rows is None:
            return [
                (pack[row, at : at + size].view(part.dtype).view(part.shape), part)
                for (row, at), part in zip(self.by_part, tensor.unbind(), strict=True)
            ]
        there = pack[self.rows, self.start : self.start + size].view(tensor.dtype)
        there = there.view(tensor.shape)
        if self.opposite:
            return [*zip(there.unbind()[::-1], tensor.unbind(), strict=True)]
        return [(there, tensor)]


class _Layout(NamedTuple):
    """Of a pack: the place of each tensor, the message for each rank, and the bytes of a row."""

    places: tuple[_Place, ...]
    messages: tuple[tuple[int, int, int], ...]  # (rank, bytes, tag)
    width: int


@lru_cache(maxsize=256)
def _layout(sizes: tuple[tuple[tuple[int, ...], int, int], ...]) -> _Layout:
    """`sizes`: (ranks, bytes of a part, tag) of each tensor."""
    row = {rank: at for at, rank in enumerate(sorted({r for ranks, *_ in sizes for r in ranks}))}
    places: list[_Place] = []
    tags: dict[int, int] = {}
    stops: dict[int, int] = {}
    ends = dict.fromkeys(row, 0)  # where the next part may begin
    for ranks, size, tag in sizes:
        rows, by_part = [row[rank] for rank in ranks], [(row[rank], ends[rank]) for rank in ranks]
        first, stop, start = min(rows), max(rows) + 1, ends[ranks[0]]
        opposite = len(rows) > 1 and rows == [*range(first, stop)][::-1]
        alike = len({ends[rank] for rank in ranks}) == 1
        regular = alike and (opposite or rows == [*range(first, stop)])
        places.append(
            _Place(slice(first, stop) if regular else None, start, opposite, tuple(by_part))
        )
        for rank in ranks:
            tags.setdefault(rank, tag)
            stops[rank] = ends[rank] + size
            ends[rank] = -(-stops[rank] // _ALIGNED) * _ALIGNED
    messages = tuple([(rank, stops[rank], tags[rank]) for rank in row])
    return _Layout(tuple(places), messages, max(ends.values()))


def _packed(
    messages: Sequence[Messages], me: int, finish: LaterCopies, *, on_host: bool
) -> list[_Part]:
    """What a rank sends to itself, or receives from itself, is not joined to one message."""
    layout = _layout(tuple([(x.ranks, x.part_bytes, x.tag) for x in messages]))
    first = messages[0].tensor
    shape, device = (len(layout.messages), layout.width), "cpu" if on_host else first.device
    pack = torch.empty(shape, dtype=torch.uint8, device=device)
    pairs: list[tuple[Tensor, Tensor]] = []
    parts: list[_Part] = []
    for x, place in zip(messages, layout.places, strict=True):
        of_tensor = place.pairs(x.tensor, pack)
        pairs += of_tensor
        if me in x.ranks:
            at = x.ranks.index(me)
            own = of_tensor[0][0][at] if len(of_tensor) == 1 else of_tensor[at][0]
            parts.append((own, me, x.tag))
    if messages[0].sent:
        copy_all(pairs)
    else:
        finish.append(partial(copy_all, [(tensor, there) for there, tensor in pairs]))
    for row, (rank, size, tag) in zip(pack.unbind(), layout.messages, strict=True):
        if rank != me:
            parts.append((row[:size], rank, tag))
    return parts


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
