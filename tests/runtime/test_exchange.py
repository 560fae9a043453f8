"""Exchanges between ranks of this process, with stand-ins for torch.distributed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mesh_attention.plan.language.buffers import Piece
from mesh_attention.runtime.transport import exchange as exchange_module
from mesh_attention.runtime.transport.exchange import Exchange, Messages
from mesh_attention.runtime.transport.interface import Transfers
from mesh_attention.runtime.transport.piece_runs import runs_of

GROUP: Any = None
RANKS, EACH = 4, 2  # heads for each rank


class Posted(NamedTuple):
    sent: bool
    tensor: Tensor
    rank: int
    tag: int


class Network:
    """Brings what was sent to where it is expected, once all ranks have posted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rank = 0
        self.sent = defaultdict[tuple[int, int], list[Posted]](list)
        self.expected = defaultdict[tuple[int, int], list[Posted]](list)
        self.finish: list[Callable[[], object]] = []
        monkeypatch.setattr(dist, "get_rank", lambda: self.rank)
        monkeypatch.setattr(dist, "batch_isend_irecv", self._post)
        monkeypatch.setattr(
            dist, "P2POp", lambda call, x, rank, _, tag: Posted(call is dist.isend, x, rank, tag)
        )

    def _post(self, posted: list[Posted]) -> list[Any]:
        order = [operation.sent for operation in posted]
        assert order == sorted(order), "gloo would let the two directions of a link take turns"
        for operation in posted:
            assert operation.tensor.is_contiguous()
            assert operation.rank != self.rank
            pair = self.rank, operation.rank
            if operation.sent:
                self.sent[pair].append(operation)
            else:
                self.expected[pair[::-1]].append(operation)
        return []

    def exchange(self, rank: int, messages: list[Messages], *, pack: bool) -> None:
        self.rank = rank
        Exchange(GROUP, host_driven=False, pack=pack).ready(messages)([], self.finish)

    def deliver(self) -> None:
        assert self.sent.keys() == self.expected.keys()
        for pair, messages in self.sent.items():
            for there, here in zip(messages, self.expected[pair], strict=True):
                assert there.tag == here.tag
                here.tensor.view(torch.uint8).view(-1).copy_(
                    there.tensor.view(torch.uint8).view(-1)
                )
        for copy in self.finish:
            copy()


# Rows of each rank in the whole, of its first and of its second stretch; in the zigzag the second
# ones lie in the opposite order.
ZIGZAG = [((2 * r, 2 * r + 2), (16 - 2 * r, 18 - 2 * r)) for r in range(RANKS)]
UNEVEN = [((0, 5), (9, 10)), ((5, 6), (10, 13)), ((6, 7), (13, 18)), ((7, 9), (18, 19))]
SHUFFLED = [ZIGZAG[r] for r in (2, 0, 3, 1)]


def transfers_to_heads(stretches: list[Any], rank: int, kinds: int) -> Transfers:
    """Each rank has all heads of its rows before, and its own heads of all rows after."""
    (a, b), (c, d) = stretches[rank]
    own = [(0, b - a), (b - a, b - a + d - c)]
    sends = tuple(
        tuple(
            Piece(f"shard{kind}", *rows, (EACH * member, EACH * member + EACH))
            for kind in range(kinds)
            for rows in own
        )
        for member in range(RANKS)
    )
    receives = tuple(
        tuple(Piece(f"whole{kind}", *rows) for kind in range(kinds) for rows in stretches[member])
        for member in range(RANKS)
    )
    return Transfers(sends, receives)


@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("small_bytes", [0, 400, 10**6])
@pytest.mark.parametrize("stretches", [ZIGZAG, UNEVEN, SHUFFLED])
def test_tokens_come_for_heads_and_back_whatever_is_packed(
    stretches: list[Any], small_bytes: int, back: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange_module, "SMALL_BYTES", small_bytes)
    network = Network(monkeypatch)
    truth = [torch.randn(20, 1, RANKS * EACH, 3), torch.randn(20, 1, RANKS * EACH, 1).double()]
    results: list[tuple[Tensor, Tensor]] = []
    for rank in range(RANKS):
        (a, b), (c, d) = stretches[rank]
        tensors = {}
        for kind, x in enumerate(truth):
            shard = torch.cat([x[a:b], x[c:d]])
            whole = x[:, :, EACH * rank : EACH * rank + EACH].contiguous()
            names = [(f"shard{kind}", shard, not back), (f"whole{kind}", whole, back)]
            for name, content, filled in names:
                tensors[name] = content if filled else torch.full_like(content, torch.nan)
                if not filled:
                    results.append((tensors[name], content))

        def view(piece: Piece, tensors: dict[str, Tensor] = tensors) -> Tensor:
            rows = tensors[piece.buffer][piece.start : piece.stop]
            return rows if piece.heads is None else rows[:, :, slice(*piece.heads)]

        moved = transfers_to_heads(stretches, rank, len(truth))
        if back:
            moved = Transfers(moved.receives, moved.sends)
        messages = [Messages(view(run.piece), *run[1:]) for run in runs_of(moved, range(RANKS))]
        network.exchange(rank, messages, pack=True)
    network.deliver()
    if small_bytes > 400:
        assert {len(messages) for messages in network.sent.values()} == {1}
    covered = {row for pair in stretches for start, stop in pair for row in range(start, stop)}
    for result, wanted in results:
        rows = sorted(covered) if len(result) == 20 else [*range(len(result))]
        assert torch.equal(result[rows], wanted[rows])


def test_pieces_side_by_side_are_one_run_in_heads_or_in_rows_in_either_order() -> None:
    runs = runs_of(transfers_to_heads(ZIGZAG, 1, kinds=1), range(RANKS))
    assert [(run.sent, run.tag, run.ranks) for run in runs] == [
        (False, 0, (0, 1, 2, 3)),
        (False, 1, (3, 2, 1, 0)),
        (True, 0, (0, 1, 2, 3)),
        (True, 1, (0, 1, 2, 3)),
    ]
    assert [run.piece for run in runs] == [
        Piece("whole0", 0, 8),
        Piece("whole0", 10, 18),
        Piece("shard0", 0, 2, (0, 8)),
        Piece("shard0", 2, 4, (0, 8)),
    ]
    uneven = runs_of(transfers_to_heads(UNEVEN, 1, kinds=1), range(RANKS))
    assert {len(run.ranks) for run in uneven if not run.sent} == {1, 2}


def test_a_piece_that_goes_to_all_members_is_one_run_and_one_view() -> None:
    sent, places = Piece("part", 2, 5), [Piece("whole", 3 * i, 3 * i + 3) for i in range(RANKS)]
    moved = Transfers(((sent,),) * RANKS, tuple((place,) for place in places))
    received, given = runs_of(moved, [7, 5, 3, 1])
    assert (received.apart, received.piece) == ("rows", Piece("whole", 0, 3 * RANKS))
    assert (given.apart, given.piece, given.ranks) == (None, sent, (7, 5, 3, 1))
    x = torch.randn(3, 1, EACH, 4)
    messages = Messages(x, *given[1:])
    assert messages.ranks == (7, 5, 3, 1)
    assert [part.data_ptr() for part in messages.parts] == [x.data_ptr()] * RANKS


@pytest.mark.parametrize("pack", [False, True])
def test_a_rank_that_sends_to_itself_alone_posts_nothing(
    pack: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = Network(monkeypatch)
    source, target = torch.randn(2, 1, 5), torch.full((2, 1, 5), torch.nan)
    pairs = [(source, True), (target, False)]
    messages = [Messages(x[tag], (2,), None, tag, sent) for x, sent in pairs for tag in range(2)]
    network.exchange(2, messages, pack=pack)
    network.deliver()
    assert not network.sent
    assert torch.equal(target, source)


def test_tensors_that_can_travel_as_they_lie_are_posted_once_for_all_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    network = Network(monkeypatch)
    x, y = torch.randn(2, 1, 5)
    messages = [Messages(x, (1,), None, 0, True), Messages(y, (1,), None, 0, False)]
    begin = Exchange(GROUP, host_driven=False).ready(messages)
    begin([], [])
    begin([], [])
    first, second = network.sent[0, 1]
    assert first is second
    assert first.tensor.data_ptr() == x.data_ptr()
