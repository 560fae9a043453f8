"""What `advise` prints to be pasted makes the plan that it is about, and nothing else is kept."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mesh_attention.choose.ask import make_plan
from mesh_attention.choose.auto import find_best, question_of
from mesh_attention.choose.plan_file import python_line, read_plan
from mesh_attention.cli.main import main
from mesh_attention.machine.load import load_cluster
from mesh_attention.plan.language.plan import Direction, Plan
from mesh_attention.plan.language.text import digest
from mesh_attention.plan.problem.mask import Mask
from mesh_attention.plan.problem.problem import Problem
from support.sample import sample


def pasted(line: str, ranks: int) -> tuple[Problem | None, Plan]:
    """What `ContextParallel` would plan with, and for which problem where the line says so."""
    group = object()

    def plan_of(
        on: object, *, seq_len: int = 0, plan: str | None = None, **said: Any
    ) -> tuple[Problem | None, Plan]:
        assert on is group
        if plan is not None:
            return None, read_plan(plan, ranks)
        mask = said.pop("mask", None) or Mask(causal=said.pop("causal"))
        names = {"num_kv_heads": "num_kv_heads", "v_head_dim": "v_head_dim"}
        names |= {"num_heads": "num_heads", "head_dim": "head_dim", "kv_seq_len": "kv_tokens"}
        sizes: dict[str, Any] = {names[name]: said.pop(name) for name in [*said] if name in names}
        size = torch.finfo(said.pop("dtype", torch.bfloat16)).bits // 8
        problem = Problem(seq_len, **sizes, element_bytes=size, mask=mask)
        return problem, make_plan(problem, ranks, **said)

    names: dict[str, Any] = {"group": group, "torch": torch, "Mask": Mask}
    problem_and_plan: tuple[Problem | None, Plan] = eval(
        line.removeprefix("cp = "), names | {"ContextParallel": plan_of}
    )
    return problem_and_plan


SLICES = [[[0, 640], [0, 640], "causal"], [[640, 960], [0, 320], "full"]]
MASK = Mask(slices=SLICES)  # type: ignore[arg-type]
CASES: dict[str, tuple[Problem, int, str, str]] = {
    "options": (
        Problem(8192, 8, 64, num_kv_heads=2),
        4,
        "hgx-h100",
        "--heads 8 --kv-heads 2 --head-dim 64 --tokens 8192",
    ),
    "float32 and a window": (
        Problem(4096, 4, 128, element_bytes=4, mask=Mask(causal=True, window=(64, 0))),
        3,
        "hgx-h100",
        "--heads 4 --element-bytes 4 --window 64 --tokens 4096",
    ),
    "two nodes, causal": (
        Problem(8192, 4, 128, num_kv_heads=2, mask=Mask(causal=True)),
        10,
        "a100-roce",
        "--heads 4 --kv-heads 2 --causal --tokens 8192",
    ),
    "slices": (
        Problem(960, 4, 128, v_head_dim=64, mask=MASK),
        2,
        "paper",
        "--heads 4 --slices slices.json --v-head-dim 64 --tokens 960",
    ),
    "other keys, options of the caller": (
        Problem(512, 4, 128, kv_tokens=1000),
        4,
        "paper",
        "--heads 4 --kv-tokens 1000 --tokens 512 --layout striped --tile 2x2",
    ),
}


@pytest.mark.parametrize("name", sample(CASES, 2))
def test_the_line_makes_the_plan_that_was_promised(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    problem, ranks, cluster, words = CASES[name]
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "slices.json").write_text(json.dumps(SLICES))
    asked = f"advise --json --cluster {cluster} --ranks {ranks} {words}"
    assert main([*asked.split(), "--output", "a plan.json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    chosen = {
        Direction(d): (pass_answer["method"], pass_answer["options"])
        for d, pass_answer in answer["chosen"]["passes"].items()
    }
    promised = digest(question_of(load_cluster(cluster), problem, ranks, chosen).plan())
    said, plan = pasted(answer["python"], ranks)
    assert said in (None, problem)
    assert digest(plan) == promised
    assert digest(pasted("ContextParallel(group, plan='a plan.json')", ranks)[1]) == promised
    assert [*home.iterdir()] == []


def test_a_line_that_needs_a_file_says_how_it_is_written() -> None:
    problem = Problem(512, 4, 16)
    ring, mesh = (find_best(problem, 2, "paper", method=name) for name in ("ring", "mesh"))
    assert 'method="mesh", ' in python_line(mesh)
    mixed = {
        Direction.FORWARD: ring.chosen[Direction.FORWARD],
        Direction.BACKWARD: mesh.chosen[Direction.BACKWARD],
    }
    line = "cp = ContextParallel(group, plan='plan.json')"
    mixed_choice = replace(mesh, chosen=mixed, unmoved=mixed)
    assert python_line(mixed_choice) == f"{line}  # advise --output plan.json writes it"
    assert python_line(mixed_choice, Path("plan.json")) == line
