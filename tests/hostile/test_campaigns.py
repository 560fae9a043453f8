"""The campaigns themselves: what they draw is what they say, they find mistakes that were put in on
purpose, and shortly run they find nothing else. `make hostile` runs them for long."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from hostile.campaign import Hang, within
from hostile.faults import FAULTS
from hostile.mutants import CAUGHT_BY, MUTANTS
from hostile.program import Instruction, Kind, random_program
from hostile.program_rank import Event
from hostile.programs import judge
from hostile.run import CAMPAIGNS, main, run_campaign

ENDLESS = 3600.0  # seconds: the number of cases ends it
# A damaged plan that `verify` accepts where it ignores rows. Builders that change draw other plans:
# run.py --only plans --mutant verify finds a new one.
ACCEPTED = "78"
SHORTLY = {
    "programs": 60,
    "exact": 40,
    "plans": 400,
    "arguments": 600,
    "arguments_on_ranks": 30,
    "command_line": 300,
}


def test_every_fault_changes_some_program_and_leaves_the_others_as_they_are() -> None:
    changed = set()
    for number in range(40):
        draw = Random(number)
        program = random_program(draw)
        for fault in FAULTS:
            new = fault(draw, list(program.instructions))
            if new is not None and new != list(program.instructions):
                changed.add(fault)
    assert changed == {*FAULTS}


def test_programs_know_their_batch_their_label_or_nothing() -> None:
    kinds = Counter(random_program(Random(number)).identity for number in range(200))
    assert min(kinds[kind] for kind in ("batch and label", "batch", "label", "nothing")) > 5


@pytest.mark.parametrize(
    ("outcome", "fault", "seconds", "is_wrong"),
    [
        ("right", "no fault", 1.0, False),
        ("told", "skip_a_call", 1.0, False),
        ("told", "no fault", 1.0, True),
        ("wrong", "skip_a_call", 1.0, True),
        ("foreign", "skip_a_call", 1.0, True),
        ("told", "skip_a_call", 100.0, True),
    ],
)
def test_a_wrong_number_a_foreign_error_and_a_long_wait_are_wrong(
    outcome: str, fault: str, seconds: float, is_wrong: bool
) -> None:
    programs = (random_program(Random(number)) for number in range(99))
    program = next(each for each in programs if each.identity == "batch and label")
    event = Event(Instruction(Kind.ATTEND, 0, 0), outcome, "Error: words", seconds)
    verdict = judge([[event], []], fault, program, "")
    assert bool(verdict.wrong) == is_wrong
    assert verdict.counts["calls"] == 1


@pytest.mark.parametrize("mutant", ["arguments", "refusals"])
def test_a_mutant_that_needs_no_other_process_is_caught(mutant: str) -> None:
    assert run_campaign(CAUGHT_BY[mutant], 2, ENDLESS, mutant=mutant, stop_at_wrong=True).wrong


def compute_without_end() -> None:
    while True:
        pass


@pytest.mark.parametrize("wait", [lambda: time.sleep(60), compute_without_end])
def test_what_waits_or_computes_without_end_is_a_hang(wait: Callable[[], object]) -> None:
    with pytest.raises(Hang, match="still running"), within(0.05):
        wait()


@pytest.mark.parametrize(("name", "cases"), [("arguments", 60), ("command_line", 30)])
def test_a_few_strange_arguments_and_lines_are_refused_by_name(name: str, cases: int) -> None:
    tally = run_campaign(name, 1, ENDLESS, cases=cases)
    assert tally.cases == cases
    assert tally.wrong == []


def test_the_command_counts_repeats_a_case_and_fails_where_something_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "result.json"
    line = ["--only", "plans", "--case", ACCEPTED, "--json", str(file)]
    assert main([*line, "--mutant", "verify"]) == 1
    assert f"again by run.py --seed 1 --only plans --case {ACCEPTED}" in capsys.readouterr().out
    result = json.loads(file.read_text())["campaigns"]["plans"]
    assert result["cases"] == 1
    assert result["counts"] == {"accepted, and wrong": 1}
    assert main(line) == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", CAMPAIGNS)
def test_a_campaign_that_is_run_shortly_finds_nothing(name: str) -> None:
    tally = run_campaign(name, 3, ENDLESS, cases=SHORTLY[name])
    assert tally.wrong == []


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS)
def test_every_mutant_is_caught(mutant: str) -> None:
    name = CAUGHT_BY[mutant]
    assert run_campaign(name, 1, 600.0, mutant=mutant, stop_at_wrong=True).wrong
