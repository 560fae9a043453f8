"""The file of a choice makes the chosen plan; where it would make another it is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mesh_attention.choose.auto import question_of
from mesh_attention.choose.plan_file import read_plan, write_choice
from mesh_attention.errors import MeshAttentionError
from mesh_attention.machine.load import load_cluster
from mesh_attention.plan.language.plan import Direction
from mesh_attention.plan.language.text import digest, plan_text
from mesh_attention.plan.methods.question import Question
from mesh_attention.plan.problem.mask import Mask
from mesh_attention.plan.problem.problem import Problem

SLICES = (((0, 64), (0, 64), "causal"), ((64, 96), (0, 32), "full"))
PASSES: list[list[tuple[str, dict[str, Any]]]] = [
    [("mesh", {"tile": (2, 2), "chunks": (1, 2)}), ("mesh", {"tile": (4, 1)})],
    [("ring", {}), ("mesh", {"combine": "nodes"})],
    [("mesh-usp", {"ulysses": 2, "tile": (2, 1), "head_slices": (1, 1)})] * 2,
]


def asked(passes: list[tuple[str, dict[str, Any]]], problem: Problem) -> Question:
    chosen = dict(zip(Direction, passes, strict=True))
    return question_of(load_cluster("a100-roce"), problem, 4, chosen)


@pytest.mark.parametrize("passes", PASSES)
@pytest.mark.parametrize(
    "problem",
    [
        Problem(4096, 8, 64, num_kv_heads=4, mask=Mask(causal=True, window=(100, 0))),
        Problem(96, 4, 16, element_bytes=4, mask=Mask(slices=SLICES)),
        Problem(64, 4, 16, kv_tokens=100, v_head_dim=8),
    ],
)
def test_what_is_read_is_what_was_written(
    passes: list[tuple[str, dict[str, Any]]], problem: Problem, tmp_path: Path
) -> None:
    question = asked(passes, problem)
    write_choice(tmp_path / "plan.json", question)
    assert (tmp_path / "plan.json").stat().st_size < 4096
    loaded_plan = read_plan(tmp_path / "plan.json", 4)
    assert digest(loaded_plan) == digest(question.plan())


def test_the_text_of_a_plan_is_taken_too(tmp_path: Path) -> None:
    plan = asked(PASSES[0], Problem(64, 4, 16)).plan()
    (tmp_path / "plan.txt").write_text(plan_text(plan))
    loaded_plan = read_plan(tmp_path / "plan.txt", 4)
    assert digest(loaded_plan) == digest(plan)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"format": "mesh-attention choice 0"}, "its format is 'mesh-attention choice 0'"),
        ({"ranks": 8}, "it is for 8 ranks, and this group has 4"),
        ({"digest": "0"}, "another version of mesh_attention wrote it"),
        ({"passes": [{"directions": ["forward"], "method": "rng", "options": {}}]}, "damaged"),
        ({"passes": [{"directions": ["forward"], "method": "mesh"}]}, "damaged"),
        ({"problem": []}, "damaged"),
        (None, "damaged"),
    ],
)
def test_other_files_are_refused_with_the_line_that_writes_a_new_one(
    change: dict[str, Any] | None, why: str, tmp_path: Path
) -> None:
    file = tmp_path / "plan.json"
    write_choice(file, asked(PASSES[0], Problem(64, 4, 16)))
    text = file.read_text()
    file.write_text(text[:-20] if change is None else json.dumps(json.loads(text) | change))
    with pytest.raises(MeshAttentionError, match=why) as refusal:
        read_plan(file, 4)
    assert f"mesh-attention advise --ranks N ... --output {file}" in str(refusal.value)
