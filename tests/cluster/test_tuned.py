"""Files of `tune`: what is read is what was written, and all else is refused with the way out."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mesh_attention import Mask, Problem
from mesh_attention.choose.auto import question_of
from mesh_attention.choose.tuned import (
    Answer,
    Known,
    Tuned,
    TunedEntry,
    Wanted,
    read_entries,
    read_tuned,
    tune_line,
    wanted,
    write_entries,
)
from mesh_attention.cli.command import Parser
from mesh_attention.cli.on_ranks import TUNE
from mesh_attention.cli.options import options_of, problem_of
from mesh_attention.errors import PlanError
from mesh_attention.machine.load import load_cluster
from mesh_attention.machine.rates import costs_of
from mesh_attention.plan.language.plan import Direction
from mesh_attention.plan.language.text import digest
from mesh_attention.plan.problem.layout import LayoutKind

CLUSTER = load_cluster("hgx-h100")
PROBLEM = Problem(96, 4, 8, mask=Mask(causal=True))
OTHER = Problem(96, 4, 8, num_kv_heads=2, mask=Mask(documents=(0, 40, 96)))
CHOSEN: dict[Direction, tuple[str, dict[str, Any]]] = {
    Direction.FORWARD: ("mesh", {"tile": (2, 2), "chunks": (1, 1)}),
    Direction.BACKWARD: ("usp", {"ulysses": 2}),
}


def answer_with(**changes: Any) -> Answer:
    seconds = {Direction.FORWARD: 1e-3, Direction.BACKWARD: 2e-3}
    answer = Answer(CHOSEN, seconds, CLUSTER.node.ranks, costs_of(CLUSTER, 4), "a CPU, gloo")
    return replace(answer, **changes)


def file_with(folder: Path, *answers: tuple[Wanted, Answer | None]) -> Path:
    file = folder / "tuned.json"
    known: Known = {"forward a": 1.5, "backward b": "no kernel"}
    write_entries(
        file, {question: TunedEntry(x, {"device": "cpu"}, known) for question, x in answers}
    )
    return file


def test_the_plan_is_the_one_that_was_measured(tmp_path: Path) -> None:
    file = file_with(tmp_path, (wanted(PROBLEM, 4), answer_with()))
    answer = read_tuned(file).answer(PROBLEM, 4)
    assert answer == answer_with()
    assert answer.text == "mesh tile=2x2 chunks=1x1, backward usp ulysses=2"
    measured = question_of(CLUSTER, PROBLEM, 4, CHOSEN)
    assert answer.question(PROBLEM, 4) == measured
    assert digest(answer.question(PROBLEM, 4).plan()) == digest(measured.plan())
    ((_, entry),) = read_entries(file).items()
    assert entry.measured == {"forward a": 1.5, "backward b": "no kernel"}
    assert entry.measured_by == {"device": "cpu"}


def test_a_file_answers_several_questions_by_sizes_ranks_and_options(tmp_path: Path) -> None:
    ring = answer_with(chosen=dict.fromkeys(Direction, ("ring", {"layout": LayoutKind.STRIPED})))
    seen = answer_with(chosen=dict.fromkeys(Direction, ("seen", {"layout": LayoutKind.ZIGZAG})))
    file = file_with(
        tmp_path,
        (wanted(PROBLEM, 4), answer_with()),
        (wanted(PROBLEM, 4, {"layout": "striped"}), ring),
        (wanted(OTHER, 2), seen),
        (wanted(OTHER, 3), None),  # a tuning that was ended
    )
    tuned = read_tuned(file)
    assert tuned.answer(PROBLEM, 4, {"layout": None, "ranks_per_node": 8}) == answer_with()
    assert tuned.answer(PROBLEM, 4, {"layout": LayoutKind.STRIPED}) == ring
    assert tuned.answer(OTHER, 2) == seen
    for problem, ranks, options in (
        (PROBLEM, 8, {}),
        (OTHER, 3, {}),
        (PROBLEM, 4, {"layout": "contiguous"}),
        (replace(PROBLEM, element_bytes=4), 4, {}),
    ):
        with pytest.raises(PlanError, match="has no answer for") as error:
            tuned.answer(problem, ranks, options)
        assert tune_line(problem, ranks, options, file) in str(error.value)
        assert "it has one for 96 tokens" in str(error.value)
    with pytest.raises(PlanError, match=r"ranks_per_node=2: .* was measured with 8"):
        tuned.answer(PROBLEM, 4, {"ranks_per_node": 2})
    with pytest.raises(PlanError, match="no method has an option 'tyle'"):
        tuned.answer(PROBLEM, 4, {"tyle": (2, 2)})
    with pytest.raises(PlanError, match="no form in a file"):
        wanted(PROBLEM, 4, {"costs": costs_of(CLUSTER, 4)})


def test_the_digest_is_that_of_the_answers(tmp_path: Path) -> None:
    four_ranks, two_ranks = (wanted(PROBLEM, 4), answer_with()), (wanted(PROBLEM, 2), answer_with())

    def digest_of(*answers: tuple[Wanted, Answer | None]) -> str:
        return read_tuned(file_with(tmp_path, *answers)).digest

    assert digest_of(four_ranks, two_ranks) == digest_of(
        two_ranks, four_ranks, (wanted(OTHER, 2), None)
    )
    digests = {
        digest_of(four_ranks),
        digest_of(two_ranks),
        digest_of(four_ranks, two_ranks),
        digest_of(),
    }
    digests.add(digest_of((four_ranks[0], answer_with(ranks_per_node=4))))
    assert len(digests) == 5


def test_no_file_moves_tokens_and_what_makes_no_plan_is_refused(tmp_path: Path) -> None:
    for options, reason in (
        ({"layout": LayoutKind.STRIPED}, "has tokens elsewhere than by default"),
        ({"tile": (3, 3)}, "makes no plan"),
    ):
        chosen = dict.fromkeys(Direction, ("mesh", options))
        tuned = Tuned(tmp_path / "x.json", {wanted(PROBLEM, 4): answer_with(chosen=chosen)})
        with pytest.raises(PlanError, match=rf"{reason}.* --again"):
            tuned.answer(PROBLEM, 4)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        ("{", "Expecting"),
        ("[1, 2]", "must be integers"),
        ("{}", "no 'version'"),
        ({"version": 0}, "version 0, and 1 is read"),
        ({"questions": [1]}, "subscriptable"),
        ({"ranks": 0}, "ranks=0"),
        ({"problem": {"q_tokens": 1}}, "no 'mask'"),
        ({"options": {"x": 1}}, "no method has an option 'x'"),
        ({"options": {"layout": "striped"}}, "another layout than what was asked for"),
        ({"measured": {"a": "fast"}}, "seconds='fast': must be a number"),
        ({"measured": {"a": {}}}, "no 'cannot_run'"),
        ({"answer": {}}, "no 'forward'"),
        ({"answer.forward.method": "x"}, "'x' is not a method"),
        ({"answer.forward.options": {"x": 1}}, "no 'x'"),
        ({"answer.forward.options": {"relayout": True}}, "another relayout than"),
        ({"answer.backward.seconds": -1.0}, "seconds=-1.0: must be finite and above 0"),
        ({"answer.ranks_per_node": "8"}, "ranks_per_node='8'"),
        ({"answer.costs.flops_per_second": 0}, "flops_per_second=0"),
    ],
)
def test_damage_is_refused_with_the_way_out(damage: Any, reason: str, tmp_path: Path) -> None:
    file = file_with(tmp_path, (wanted(PROBLEM, 4), answer_with()))
    if isinstance(damage, dict):
        content = json.loads(file.read_text())
        for path, value in damage.items():
            *names, last = path.split(".")
            at = content if path in content else content["questions"][0]
            for name in names:
                at = at[name]
            at[last] = value
        damage = json.dumps(content)
    file.write_text(damage)
    with pytest.raises(PlanError, match="is not a file of mesh-attention tune") as error:
        read_tuned(file)
    assert reason in str(error.value)
    assert "mesh_attention tune" in str(error.value)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"No such file.* mesh_attention tune .*--output"):
        read_tuned(tmp_path / "missing.json")
    with pytest.raises(PlanError, match="Is a directory"):
        read_tuned(tmp_path)
    with pytest.raises(PlanError, match="tuned=5: must be the name of a file"):
        read_tuned(5)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "problem",
    [
        PROBLEM,
        OTHER,
        Problem(64, 2, 8, kv_tokens=128, v_head_dim=16, element_bytes=4),
        Problem(64, 2, 8, mask=Mask(window=(8, 0))),
        Problem(64, 2, 8, mask=Mask(causal=True, window=(8, 0))),
        Problem(64, 2, 8, mask=Mask(causal=True, window=(None, 4))),
        Problem(64, 2, 8, mask=Mask(causal=True, prefix=5)),
    ],
)
def test_the_line_asks_for_what_is_wanted(problem: Problem) -> None:
    options = {"tile": [2, 2], "relayout": True, "layout": "zigzag"}
    words = shlex.split(tune_line(problem, 4, options, "my file.json"))
    assert words[:6] == ["torchrun", "--nproc-per-node", "4", "-m", "mesh_attention", "tune"]
    args = Parser("tune", TUNE).parse(words[6:])
    assert args.output == Path("my file.json")
    assert problem_of(args) == problem
    assert wanted(problem, 4, options_of(args)) == wanted(problem, 4, options)
