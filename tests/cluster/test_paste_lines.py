"""What `advise` prints to be pasted makes the plan that it is about."""

from __future__ import annotations

from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import torch
from mesh_attention.choose.answers import (
    VARIABLE,
    Chosen,
    ask_auto,
    keep_answer,
    question_of_answer,
)
from mesh_attention.choose.one_pass import Standing

from mesh_attention.choose.ask import make_plan
from mesh_attention.choose.auto import BestOfAll, find_best_of_all
from mesh_attention.choose.ranking import python_line
from mesh_attention.cli import advise
from mesh_attention.cli.advise import asked_of_all
from mesh_attention.cli.command import Parser
from mesh_attention.cost.detect_cluster import Machine, find_cluster
from mesh_attention.cost.machine.cluster import Cluster
from mesh_attention.cost.machine.load import load_cluster
from mesh_attention.plan.mask import Mask
from mesh_attention.plan.methods.table import AUTO
from mesh_attention.plan.plan import Direction, Plan
from mesh_attention.plan.problem import Problem
from mesh_attention.plan.text import digest

RANKS = 2


def pasted(text: str, ranks: int = RANKS) -> Plan:
    """What `ContextParallel` would plan with."""
    group = object()

    def plan_of(
        on: object, seq_len: int = 0, num_heads: int = 0, head_dim: int = 0, **said: Any
    ) -> Plan:
        assert on is group
        if "plan" in said:
            plan: Plan = said["plan"]
            return plan
        mask = said.pop("mask", None) or Mask(causal=said.pop("causal"))
        said.pop("causal", None)
        optional = "num_kv_heads", "v_head_dim"
        sizes: dict[str, Any] = {n: said.pop(n) for n in optional if n in said}
        sizes |= {"kv_tokens": said.pop("kv_seq_len")} if "kv_seq_len" in said else {}
        size = torch.finfo(said.pop("dtype", torch.bfloat16)).bits // 8
        problem = Problem(seq_len, num_heads, head_dim, **sizes, element_bytes=size, mask=mask)
        if said["method"] == AUTO:
            del said["method"]
            return ask_auto(problem, ranks, said.pop("cluster"), said).plan()
        return make_plan(problem, ranks, **said)

    names: dict[str, Any] = {"group": group, "torch": torch, "Mask": Mask}
    names["ContextParallel"] = plan_of
    lines = text.splitlines()
    for line in lines[:-1]:
        exec(line.replace("import ContextParallel, ", "import "), names)
    found: Plan = eval(lines[-1].removeprefix("cp = "), names)
    return found


def test_lines_can_be_pasted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "cache"))
    text = (resources.files("mesh_attention.cost.machine") / "clusters/hgx-h100.toml").read_text()
    file = tmp_path / "a \"quoted\" 'name'.toml"
    file.write_text(text)
    cluster = load_cluster(file)
    slices = (((0, 64), (0, 64), "causal"), ((64, 96), (0, 32), "full"))
    small = find_best_of_all(Problem(96, 4, 16), RANKS, cluster, options={"chunks": (1, 1)})
    uneven, same = ("ring", "mesh"), ("mesh", "mesh")
    for problem in (
        Problem(96, 4, 16, num_kv_heads=2, element_bytes=4, mask=Mask(slices=slices)),
        Problem(100, 4, 16, v_head_dim=8, mask=Mask(causal=True, window=(8, 0))),
        Problem(64, 4, 16, kv_tokens=100),
    ):
        for names in (uneven, same):
            found = answer(small, problem, cluster, names)
            keep_answer(problem, RANKS, cluster, found, {})
            for is_kept in (True, False):
                line = python_line(found, problem, cluster, {}, repr(str(file)), is_kept=is_kept)
                assert digest(pasted(line)) == digest(found.plan()), line
    # Where the costs of the cluster decide on the order of a schedule, options are not all.
    problem, ranks = Problem(8192, 8, 64, num_kv_heads=4, mask=Mask(causal=True)), 16
    cluster = load_cluster("a100-roce")
    found = answer(small, problem, cluster, same, ranks, tile=(4, 4), chunks=(2, 4))
    keep_answer(problem, ranks, cluster, found, {})
    for is_kept in (True, False):
        line = python_line(found, problem, cluster, {}, "'a100-roce'", is_kept=is_kept)
        assert "'a100-roce'" in line
        made = pasted(line, ranks)
        assert [one.schedule for one in made.passes] == [
            one.schedule for one in found.plan().passes
        ]


def answer(
    searched: BestOfAll,
    problem: Problem,
    cluster: Cluster,
    names: tuple[str, ...],
    ranks: int = RANKS,
    **options: Any,
) -> BestOfAll:
    """As if these methods had been found for forward and backward."""
    chosen = {way: Standing(name, options, 1.0) for way, name in zip(Direction, names, strict=True)}
    by_pass: Chosen = {
        way.value: {"method": one.name, "options": options} for way, one in chosen.items()
    }
    question = question_of_answer(problem, ranks, cluster, by_pass)
    return replace(searched, chosen=chosen, unmoved=chosen, question=question)


def test_a_cluster_that_no_file_describes_is_found_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = Machine("NVIDIA H100 80GB HBM3", nic_gbits=(25.0,))
    monkeypatch.setattr(advise, "gpu_of_driver", lambda: machine.gpu)
    monkeypatch.setattr(advise, "nic_gbits", lambda: machine.nic_gbits)
    args = Parser("advise", advise.COMMAND).parse(["--ranks", "2", "--tokens", "64"])
    asked = asked_of_all(args, "advise")
    assert eval(asked.named, {"find_cluster": find_cluster, "Machine": Machine}) == asked.cluster
