"""What ranks say of a call, compared: where they differ, and which rank is odd, in words."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import suppress
from typing import Any

from mesh_attention.errors import MeshAttentionError
from mesh_attention.plan.read.agreement import AS_MADE, Meetings, disagreements
from mesh_attention.runtime.agreement.identity import BATCH_NUMBER, OF_ONE_KIND, ORDER, Statement
from mesh_attention.runtime.transport.job_store import as_words

# Words in verdicts, by which all ranks know what follows. After this the group is refused.
OUT_OF_STEP = (
    "the ranks are at different points of their programs, and this process group is refused from "
    "now on"
)
COMPARE_PROGRAMS = "compare the programs"
# Some know their kinds of call and wait in the comparison, before data moves: it tells them apart.
LEFT_TO_THE_CALL = "ranks differ, and compare in the call"
FOLLOW = "follow the first rank: "  # with what it chose by
_COUNTED = (
    " (batches are counted by shard, shard_batch, documents and context_parallel: call these alike "
    "on all ranks)"
)

SAMPLE = "sample of the keys"  # in a statement; equal on all ranks if none has cut its tensors

Said = dict[int, dict[str, Any]]  # by global rank


def read_said(said: bytes) -> dict[str, Any]:
    """What a rank has said of its call; nonsense is an error of that rank."""
    with suppress(ValueError, RecursionError):
        read = json.loads(said)
        if isinstance(read, dict) and isinstance(read.get("statement"), dict):
            return {"error": None, "in_flight": False} | read
    seen = as_words(said[:100])
    return {
        "statement": {},
        "error": f"its key in the job's store holds nonsense, {seen!r}: does another program, or "
        "another version of mesh_attention, write there?",
        "in_flight": True,
    }


def verdict_on(said: Said, *, complete: bool) -> str:
    """Empty if all agree; otherwise one line that names the odd ranks, or a word such as
    `COMPARE_PROGRAMS`. `complete`: all ranks have spoken."""
    broken = [(rank, its["error"]) for rank, its in said.items() if its["error"]]
    if broken:
        rank, error = broken[0]
        others = f" (and {len(broken) - 1} more ranks)" if len(broken) > 1 else ""
        return f"rank {rank}{others}: {error}"
    statements = {rank: dict(its["statement"]) for rank, its in said.items()}
    meetings = {rank: its.pop("meetings", None) for rank, its in statements.items()}
    samples = {its.pop(SAMPLE, None) for its in statements.values()}
    programs = {its.get("programs") for its in statements.values()}
    mixed = AS_MADE in programs and len(programs) > 1
    if mixed:
        for statement in statements.values():
            statement.pop("programs", None)  # a rank that is inside a call says nothing of them
    chosen_by = {rank: its.pop("auto", None) for rank, its in statements.items()}
    follow = len({*chosen_by.values()}) > 1 and None not in chosen_by.values()
    if follow:
        for statement in statements.values():
            statement.pop("plan", None)  # it comes of the choice
    differ = _odd_statement(statements)
    if differ and is_of_order(said):
        return f"{differ}{_COUNTED if BATCH_NUMBER in differ else ''}; {OUT_OF_STEP}"
    begun = [its for its in said.values() if its.get("in_flight")]
    if differ and complete and begun and all(its.get("waits") for its in begun):
        return LEFT_TO_THE_CALL
    if "the whole batch is" in differ:  # as `CallIdentity` names it
        return f"{differ}; all ranks of the group must load the same batch"
    if differ or not complete:
        return differ
    if len(said) > 1 and len(samples) == 1 and samples != {None}:
        return (
            f"ranks {sorted(said)} hold the same keys, but each should hold its own part of the "
            "sequence: cut whole tensors by shard or shard_batch; if these are random numbers of "
            "one seed, to measure time, give seq_len"
        )
    if follow:
        return f"{FOLLOW}{chosen_by[min(chosen_by)]}"
    if mixed:
        return COMPARE_PROGRAMS
    # A rank that is inside a call may know nothing of them any more.
    return _odd_meetings({rank: own for rank, own in meetings.items() if own is not None})


def is_of_order(said: Said) -> bool:
    """Whether ranks are at different points of their programs: each will take its next call for
    that of the others."""
    statements = [its["statement"] for its in said.values()]
    places = [
        ([its.get(name) for name in ORDER], [name in its for name in OF_ONE_KIND])
        for its in statements
    ]
    return any(place != places[0] for place in places)


def _odd_statement(said: dict[int, Statement]) -> str:
    texts = {rank: json.dumps(its, sort_keys=True) for rank, its in said.items()}
    usual = Counter(texts.values()).most_common(1)[0][0]
    odd = [rank for rank, text in texts.items() if text != usual]
    if not odd:
        return ""
    expected = json.loads(usual)
    names = [
        name
        for name in {**expected, **{name: None for rank in odd for name in said[rank]}}
        if any(said[rank].get(name) != expected.get(name) for rank in odd)
    ]
    by_all = [x for x in names if x in expected and all(x in said[rank] for rank in odd)]
    if "pass" in by_all:  # with what calls of other kinds are made says nothing
        names = [name for name in by_all if name in ORDER]
    names.sort(key=lambda name: name not in ORDER)  # first where they are in their programs
    differ = "; ".join(
        f"{name} is {_by_ranks(name, {rank: said[rank] for rank in odd}, expected)}"
        for name in names
    )
    who = f"rank {odd[0]}" if len(odd) == 1 else f"ranks {odd}"
    if 2 * len(odd) == len(said):  # no majority says who is right
        who += f" (or {[rank for rank in said if rank not in odd]})"
    verb = "disagrees" if len(odd) == 1 else "disagree"
    return f"{who} of the group {sorted(said)} {verb}: {differ}"


def _by_ranks(name: str, odd: dict[int, Statement], expected: Statement) -> str:
    """The values of something that differs, with the ranks that have them."""
    usual, ranks = repr(expected.get(name)), dict[str, list[int]]()
    for rank, statement in odd.items():
        ranks.setdefault(repr(statement.get(name)), []).append(rank)
    if len(ranks) == 1:
        return f"{next(iter(ranks))} there, {usual} elsewhere"
    values = [f"{value} on ranks {on}" for value, on in ranks.items()]
    return f"{', '.join(values)}, {usual} elsewhere"


def _odd_meetings(said: dict[int, dict[str, tuple[str, int]]]) -> str:
    differences = []
    for name, odd in disagreements(
        {rank: {name: Meetings(*its) for name, its in own.items()} for rank, own in said.items()}
    ).items():
        others = [rank for rank, own in said.items() if name in own and rank not in odd]
        tie = f" (or {others})" if len(others) == len(odd) else ""
        differences.append(f"ranks {odd}{tie} in group {name}")
    if not differences:
        return ""
    return (
        "the plans of the ranks do not fit together, although they answer the same question: "
        f"collectives differ in order, kind or size on {'; '.join(differences)}; "
        "give all ranks the same plan"
    )


def error_text(error: BaseException) -> str:
    """Our own errors speak for themselves; others are named by their class."""
    try:
        words = str(error).encode(errors="backslashreplace").decode()
    except Exception as failed:  # of a caller's error
        words = f"it cannot be told ({type(failed).__name__})"
    if isinstance(error, MeshAttentionError):
        return words
    return f"{type(error).__name__}: {words}" if words else f"{type(error).__name__}()"
