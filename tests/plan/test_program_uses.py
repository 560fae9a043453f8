"""What operations read and write: all that readers of programs know of order and memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mesh_attention.plan.language.buffers import Piece
from mesh_attention.plan.language.member_pieces import heads_as_bits
from mesh_attention.plan.language.program import Attend, AttendBackward, Task, reads, writes
from mesh_attention.plan.language.workspace import _History

TASK = Task("C", (0, 0))


def piece(name: str) -> Piece:
    return Piece(name, 0, 4)


ATTEND = Attend(
    TASK, piece("q"), piece("k"), piece("v"), piece("out"), piece("lse"), calls=(), fresh=True
)
BACKWARD = AttendBackward(
    TASK,
    piece("q"),
    piece("k"),
    piece("v"),
    piece("grad_out"),
    piece("lse"),
    out=None,
    delta=piece("delta"),
    grad_q=piece("grad_q"),
    grad_k=piece("grad_k"),
    grad_v=piece("grad_v"),
    calls=(),
    fresh_q=True,
    fresh_kv=True,
)


def names(pieces: object) -> list[str]:
    return [operand.buffer for operand in pieces]  # type: ignore[attr-defined]


def test_an_attention_reads_its_results_only_if_it_adds_to_them() -> None:
    assert names(reads(ATTEND)) == ["q", "k", "v"]
    assert names(reads(replace(ATTEND, fresh=False))) == ["q", "k", "v", "out", "lse"]
    assert names(writes(ATTEND)) == ["out", "lse"]


@pytest.mark.parametrize("fresh_q", [True, False])
@pytest.mark.parametrize("fresh_kv", [True, False])
def test_gradients_are_read_only_where_they_are_added_to(fresh_q: bool, fresh_kv: bool) -> None:
    buffers = names(reads(replace(BACKWARD, fresh_q=fresh_q, fresh_kv=fresh_kv)))
    assert buffers[:6] == ["q", "k", "v", "grad_out", "lse", "delta"]
    assert buffers[6:] == ["grad_q"] * (not fresh_q) + ["grad_k", "grad_v"] * (not fresh_kv)


def left_after_a_write(before: Piece, written: Piece) -> bool:
    """Whether an earlier read is still remembered."""
    earlier, heads = heads_as_bits(before.heads), heads_as_bits(written.heads)
    history = _History(reads={earlier: [(before.start, before.stop, 0)]})
    history.write(heads, written.start, written.stop, 1)
    assert history.writes == {heads: [(written.start, written.stop, 1)]}
    return any(history.reads.values())


def test_a_write_forgets_what_lies_inside_it_by_its_rows_and_all_of_its_heads() -> None:
    whole = Piece("x", 0, 8)
    some = Piece("x", 0, 8, heads=(2, 6))
    assert not left_after_a_write(Piece("x", 2, 4), whole)
    assert left_after_a_write(Piece("x", 2, 9), whole)
    assert not left_after_a_write(Piece("x", 2, 4, heads=(3, 6)), some)
    assert not left_after_a_write(Piece("x", 0, 8, heads=(2, 6)), some)
    assert left_after_a_write(Piece("x", 2, 4, heads=(3, 7)), some)
    assert left_after_a_write(Piece("x", 2, 4, heads=(1, 3)), some)
    assert left_after_a_write(Piece("x", 2, 4), some)
