"""The agreement of ranks, without processes: threads that share a store."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore

from mesh_attention.errors import MeshAttentionError
from mesh_attention.plan.read.agreement import AS_MADE
from mesh_attention.runtime.agreement import handshake
from mesh_attention.runtime.agreement.handshake import DisagreementError, Handshake
from mesh_attention.runtime.agreement.verdict import OUT_OF_STEP, verdict_on
from mesh_attention.runtime.transport.job_store import as_number, as_words

RANKS = (3, 5, 8)  # global ranks: a group need not begin at 0
LONG = timedelta(seconds=30)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> HashStore:
    shared = HashStore()
    monkeypatch.setattr(handshake, "default_store", lambda: shared)
    monkeypatch.setattr(handshake, "_GRACE_SECONDS", 0.3)
    return shared


def handshakes() -> dict[int, Handshake]:
    def of(rank: int) -> Any:
        return SimpleNamespace(
            ranks=RANKS, global_rank_of_self=rank, lasting_name="g", timeout=lambda _: LONG
        )

    return {rank: Handshake(of(rank)) for rank in RANKS}


def together(
    made: dict[int, Handshake],
    statements: dict[int, dict[str, Any]],
    errors: dict[int, Exception] | None = None,
    *,
    in_flight: tuple[int, ...] = (),
    timeout: timedelta = LONG,
    call: int = 1,
) -> dict[int, Any]:
    """What each rank that makes a statement gets: the answer, or the error that it raises."""

    def agree(rank: int) -> Any:
        error = (errors or {}).get(rank)
        flying = rank in in_flight
        try:
            return made[rank].agree(
                statements[rank], error, call=call, timeout=timeout, in_flight=flying
            )
        except Exception as raised:
            return raised

    with ThreadPoolExecutor(len(RANKS)) as threads:
        return dict(zip(statements, threads.map(agree, statements), strict=True))


def texts(results: dict[int, Any]) -> dict[int, str]:
    assert all(isinstance(result, DisagreementError) for result in results.values()), results
    return {rank: str(result) for rank, result in results.items()}


@pytest.mark.usefixtures("store")
def test_equal_statements_are_agreed_on_round_after_round() -> None:
    made = handshakes()
    for number in range(3):
        same = {rank: {"tokens": number} for rank in RANKS}
        assert together(made, same) == dict.fromkeys(RANKS, False)
    assert not any(maker.left_in_flight for maker in made.values())


def test_keys_of_earlier_rounds_are_forgotten(store: HashStore) -> None:
    made = handshakes()
    together(made, {rank: {} for rank in RANKS})
    together(made, {rank: {} for rank in RANKS})
    second = store.num_keys()
    for _ in range(5):
        together(made, {rank: {} for rank in RANKS})
    assert store.num_keys() == second


@pytest.mark.usefixtures("store")
def test_an_odd_rank_is_named_on_all_ranks() -> None:
    result = together(handshakes(), {3: {"tokens": 4}, 5: {"tokens": 6}, 8: {"tokens": 4}})
    message = "rank 5 of the group [3, 5, 8] disagrees: tokens is 6 there, 4 elsewhere"
    assert texts(result) == dict.fromkeys(RANKS, message)


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize("silent", RANKS)
def test_a_contradiction_is_told_soon_although_a_rank_never_comes(silent: int) -> None:
    first, second = (rank for rank in RANKS if rank != silent)
    made = handshakes()
    begun = time.monotonic()
    results = together(made, {first: {"tokens": 4}, second: {"tokens": 6}})
    assert time.monotonic() - begun < 15  # of the 30 that ranks wait for each other
    for message in texts(results).values():
        assert "disagrees" in message
        assert f"(or [{first}])" in message or f"(or [{second}])" in message


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize("flying", [False, True])
@pytest.mark.parametrize("late", RANKS)
def test_before_the_next_call_a_silent_rank_says_whether_it_is_late_or_in_a_call(
    late: int, flying: bool
) -> None:
    first, second = (rank for rank in RANKS if rank != late)
    made = handshakes()
    failed = together(made, {first: {}, second: {}}, {first: ValueError("no")})
    assert str(failed[second]) == f"rank {first}: ValueError: no"
    assert not any(maker.left_in_flight for maker in made.values())
    assert made[late].hear_silent() is None  # it has not failed
    with ThreadPoolExecutor(2) as threads:
        waiting = [threads.submit(made[rank].hear_silent) for rank in (first, second)]
        time.sleep(0.1)
        assert not any(each.done() for each in waiting)
        together(made, {late: {}}, in_flight=(late,) if flying else ())
        lost = str(failed[second]) if flying else None
        assert [each.result() for each in waiting] == [lost] * 2
    assert made[late].left_in_flight is flying


@pytest.mark.usefixtures("store")
def test_a_silent_rank_that_never_comes_is_named_when_the_time_is_up() -> None:
    made = handshakes()
    together(made, {3: {}, 5: {}}, {5: ValueError("no")}, timeout=timedelta(seconds=1))
    assert made[3].hear_silent() == f"ranks [8] did not come within 1 s; {OUT_OF_STEP}"
    made[5].find_cause = lambda: "rank 8 has ended"
    made[5]._timeout = LONG
    assert made[5].hear_silent() == "rank 8 has ended"


@pytest.mark.usefixtures("store")
def test_without_a_contradiction_ranks_wait_for_the_last_one() -> None:
    made = handshakes()

    def late() -> Any:
        time.sleep(1.0)  # longer than the grace after a contradiction
        return made[8].agree({}, call=1, timeout=LONG)

    with ThreadPoolExecutor(1) as thread:
        last = thread.submit(late)
        assert together(made, {3: {}, 5: {}}) == {3: False, 5: False}
        assert last.result() is False


@pytest.mark.usefixtures("store")
def test_ranks_that_do_not_come_are_named_when_the_time_is_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(handshake, "_PATIENCE_SECONDS", 0.2)
    made, said = handshakes(), {"token_mean": "sum"}
    with pytest.warns(UserWarning, match=r"rank 3 has waited \d+ s for ranks \[8\]"):
        result = together(made, {3: said, 5: said}, timeout=timedelta(seconds=1))
    message = f"ranks [8] did not reach the same call (token_mean) within 1 s; {OUT_OF_STEP}"
    assert texts(result) == {3: message, 5: message}
    assert texts(together(made, {8: said})) == {8: message}  # at once


@pytest.mark.usefixtures("store")
def test_a_rank_raises_its_own_error_and_the_others_are_told_whose_it_is() -> None:
    error = ValueError("no such mask")
    result = together(handshakes(), {rank: {} for rank in RANKS}, {5: error})
    assert result.pop(5) is error
    assert texts(result) == dict.fromkeys((3, 8), "rank 5: ValueError: no such mask")


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize("rank", RANKS)
def test_a_rank_with_an_error_waits_only_a_while_for_the_others(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake, "_PATIENCE_SECONDS", 0.2)
    made = handshakes()
    error = MeshAttentionError("heads do not fit")
    begun = time.monotonic()
    assert together(made, {rank: {}}, {rank: error})[rank] is error
    assert time.monotonic() - begun < 10


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize("flying", [(), (8,)])
def test_transfers_are_in_flight_after_an_error_where_a_rank_had_begun(
    flying: tuple[int, ...],
) -> None:
    made = handshakes()
    together(made, {rank: {} for rank in RANKS}, {5: ValueError("no")}, in_flight=flying)
    assert [maker.left_in_flight for maker in made.values()] == [bool(flying)] * 3


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize(
    ("waits", "statement", "goes_on"),
    [
        (True, {"needs_grad": False}, True),
        (False, {"needs_grad": False}, False),  # on a device nothing waits for the comparison
        (True, {"unshard": 4}, False),  # at another point of its program
    ],
)
def test_ranks_that_wait_in_a_call_leave_it_to_that_to_tell_who_is_odd(
    waits: bool, statement: dict[str, Any], goes_on: bool
) -> None:
    made, usual = handshakes(), {"needs_grad": True}
    with ThreadPoolExecutor(1) as thread:
        how: dict[str, Any] = {"call": 2, "timeout": LONG, "in_flight": True, "waits": waits}
        last = thread.submit(made[8].agree, statement, **how)
        results = together(made, {3: usual, 5: usual})
        assert (last.exception() is None) == goes_on
    assert [result is False for result in results.values()] == [goes_on] * 2
    assert [each.left_to_the_call for each in made.values()] == [goes_on] * 3


@pytest.mark.usefixtures("store")
def test_programs_are_compared_where_some_ranks_made_them_and_others_were_given_them() -> None:
    mixed = {3: {"programs": AS_MADE}, 5: {"programs": "abc"}, 8: {"programs": AS_MADE}}
    assert together(handshakes(), mixed) == dict.fromkeys(RANKS, True)


@pytest.mark.usefixtures("store")
def test_a_rank_sees_that_another_has_asked_for_an_agreement_before_this_call() -> None:
    made = handshakes()
    assert not made[5].is_called_for(8)
    with ThreadPoolExecutor(1) as thread:
        first = thread.submit(made[3].agree, {}, call=7, timeout=LONG)
        deadline = time.monotonic() + 10
        while not made[5].is_called_for(8) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert made[5].is_called_for(8)
        assert not made[5].is_called_for(7)  # at which the other one is too
        together(made, {5: {}, 8: {}}, call=7)
        assert first.result() is False


def test_the_verdict_counts_the_ranks_with_errors_and_tells_the_first() -> None:
    statements: dict[int, dict[str, Any]] = {r: {"statement": {}, "error": None} for r in RANKS}
    assert verdict_on(statements, complete=True) == ""
    broken = {5: {"statement": {}, "error": "no"}, 8: {"statement": {}, "error": "not"}}
    assert verdict_on(statements | broken, complete=True) == "rank 5 (and 1 more ranks): no"


def test_half_against_half_says_that_either_may_be_right() -> None:
    halves = {
        rank: {"statement": {"tokens": tokens, "heads": 2}, "error": None}
        for rank, tokens in ((0, 4), (1, 4), (2, 6), (3, 6))
    }
    assert verdict_on(halves, complete=True) == (
        "ranks [2, 3] (or [0, 1]) of the group [0, 1, 2, 3] disagree: "
        "tokens is 6 there, 4 elsewhere"
    )


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        (
            {"pass": "unshard", "label": "2", "plan": "b"},
            "label is '2' there, '1' elsewhere; pass is 'unshard' there, 'forward' elsewhere",
        ),
        (
            {"needs_grad": True, "label": "1", "plan": "a"},
            "pass is None there, 'forward' elsewhere; needs_grad is True there, None elsewhere",
        ),
    ],
)
def test_ranks_at_different_calls_are_told_where_each_of_them_is(
    odd: dict[str, Any], words: str
) -> None:
    """And not in what else calls of two kinds differ; a rank may not have come to a pass yet."""
    usual = {"pass": "forward", "label": "1", "plan": "a"}
    said = {
        rank: {"statement": odd if rank == 5 else usual, "error": None, "in_flight": True}
        for rank in RANKS
    }
    assert verdict_on(said, complete=True) == (
        f"rank 5 of the group {[*RANKS]} disagrees: {words}; {OUT_OF_STEP}"
    )


@pytest.mark.parametrize("nonsense", ["\x1b[2J nonsense", "[1, 2]", '{"statement": 3}', "[" * 9999])
def test_nonsense_in_the_store_is_an_error_of_the_rank_whose_key_has_it(
    store: HashStore, nonsense: str
) -> None:
    made = handshakes()
    store.set("g/agreement/round1/5", nonsense)
    for message in texts(together(made, {rank: {} for rank in (3, 8)})).values():
        assert message.startswith("rank 5: its key in the job's store holds nonsense")
        assert message.isprintable()
        assert len(message) < 400


def test_what_a_peer_says_can_be_printed_whatever_it_is() -> None:
    assert as_words(b"\x1b[31mred\r\n\xff\x9b") == "\\x1b[31mred\\r\n\ufffd\ufffd"
    assert as_words("Grüße".encode()) == "Grüße"
    assert as_words(b"y" * 50_000).endswith("y ... (40000 more characters)")
    assert [as_number(x) for x in (b"12", b"", b"-1", b"\xb2")] == [12, 0, 0, 0]


def test_three_values_are_told_with_the_ranks_that_have_them() -> None:
    times = {
        rank: {"statement": {"timeout": seconds, "heads": 2}, "error": None}
        for rank, seconds in ((0, 4.0), (1, 5.0), (2, 6.0), (3, 4.0), (4, 5.0))
    }
    assert verdict_on(times, complete=True) == (
        "ranks [1, 2, 4] of the group [0, 1, 2, 3, 4] disagree: "
        "timeout is 5.0 on ranks [1, 4], 6.0 on ranks [2], 4.0 elsewhere"
    )


def test_a_rank_inside_a_call_and_one_with_a_new_plan_are_told_apart() -> None:
    inside = {"plan": "old", "batch": 1}
    new = {"plan": "new", "programs": AS_MADE}
    said = {
        rank: {"statement": statement, "error": None, "in_flight": rank != 8}
        for rank, statement in ((3, inside), (5, inside), (8, new))
    }
    assert "rank 8 of the group [3, 5, 8] disagrees: " in verdict_on(said, complete=True)


def test_ranks_that_chose_by_something_else_follow_the_first() -> None:
    chose: dict[int, dict[str, Any]] = {
        rank: {"statement": {"plan": f"of {rank}", "auto": f"by {rank}"}, "error": None}
        for rank in RANKS
    }
    assert verdict_on(chose, complete=True) == f"follow the first rank: by {RANKS[0]}"
    assert verdict_on(chose, complete=False) == ""
    alike = {rank: {"statement": {"plan": "p", "auto": "by"}, "error": None} for rank in RANKS}
    assert verdict_on(alike, complete=True) == ""
    named = {RANKS[0]: {"statement": {"plan": "p"}, "error": None}}
    assert verdict_on(alike | named, complete=True) == ""  # another way to the same plan
    assert "disagree: plan is" in verdict_on(chose | named, complete=True)
    chose[RANKS[1]]["statement"]["softcap"] = 1.0
    assert "disagrees: softcap" in verdict_on(chose, complete=True)
