"""`tune` on real processes: the same choice everywhere, in the file that was named, also where it
was ended and goes on. No test is about a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import mesh_attention.measure.tune
from mesh_attention import ContextParallel, Mask, Problem
from mesh_attention.choose.auto import question_of
from mesh_attention.choose.scored import Scored
from mesh_attention.choose.tuned import read_entries, read_tuned, wanted
from mesh_attention.choose.tuning import Tuning, contenders
from mesh_attention.cli.main import main
from mesh_attention.cost.planning import plan_on
from mesh_attention.errors import MeshAttentionError, PlanError
from mesh_attention.kernels.registry import KernelRefusedError
from mesh_attention.machine.cluster import Cluster
from mesh_attention.machine.load import load_cluster
from mesh_attention.measure.ranks import Refusal, attempt, ranks_of_group, reason_of
from mesh_attention.measure.tune import tune_ranks
from mesh_attention.plan.language.plan import Direction
from mesh_attention.plan.language.text import digest
from mesh_attention.runtime.agreement.handshake import DisagreementError
from mesh_attention.runtime.transport.distributed import CommunicationError
from mesh_attention.runtime.transport.job_store import LostStoreError
from support.pool import WorkerPool
from support.raised import raised_by

CPU = torch.device("cpu")
tune_module: Any = mesh_attention.measure.tune
PROBLEM = Problem(48, 2, 8, mask=Mask(causal=True), element_bytes=4)
OPTIONS: dict[str, Any] = {"layout": "zigzag"}  # one place for all


def few(problem: Problem, num_ranks: int, cluster: Cluster, options: Any) -> Any:
    """In place of a search: settings that take a moment to find."""
    uncut: dict[str, Any] = {"chunks": (1, 1)}
    settings = [("mesh", {}), ("ring", {}), ("ulysses", {}), ("mesh", uncut)]
    every = {}
    for direction in Direction:
        every[direction] = [
            Scored(
                *(direction, method, how | options, 1.0 + at / 100, 0),
                fits=True,
                place=str(
                    plan_on(
                        cluster, problem, num_ranks, method=method, **how, **options
                    ).q_layout.to_json()
                ),
                stays=True,
                operations=1,
                may_wait=False,
            )
            for at, (method, how) in enumerate(settings)
        ]
    return every


def tune(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    ranks = ranks_of_group(None, CPU)
    cluster = load_cluster("hgx-h100")
    # The first rank reads and writes; others may see no such folder.
    output = Path(folder, "tuned.json") if rank == 0 else Path(folder, "nowhere", "tuned.json")
    results: dict[str, Any] = {}

    def tuned(measurements: int, problem: Problem = PROBLEM, **how: Any) -> Any:
        how = {"output": output, "lasting": 0.0, "measurements": measurements, **how}
        return tune_ranks(ranks, problem, how.pop("cluster", cluster), OPTIONS, **how)

    tune_module.contenders = few
    # An end in the middle: the third measurement of four never comes back.
    made: list[int] = []
    measure = tune_module.plan_seconds

    def ends(*args: Any, **how: Any) -> Any:
        made.append(1)
        if len(made) == 3:
            raise KeyboardInterrupt
        return measure(*args, **how)

    tune_module.plan_seconds = ends
    try:
        tuned(4)
    except KeyboardInterrupt:
        results["ended"] = len(made)
    finally:
        tune_module.plan_seconds = measure
    ranks.wait_for_all()
    file = Path(folder, "tuned.json")
    results["no answer yet"] = raised_by(
        lambda: read_tuned(file).answer(PROBLEM, world_size, OPTIONS)
    )
    ranks.wait_for_all()
    steps: list[tuple[int, int]] = []
    outcome = tuned(4, progress=lambda *at: steps.append(at))
    results["went_on"] = outcome.before, outcome.taken, [x.key for x in outcome.best], steps
    results["measured"] = outcome.tuning.known
    results["known"] = (lambda x: (x.before, x.taken, x.stays))(tuned(4))
    answer = read_tuned(file).answer(PROBLEM, world_size, OPTIONS)
    plan = answer.question(PROBLEM, world_size).plan()
    chosen = {x.direction: (x.name, x.options) for x in outcome.best}
    measured = question_of(cluster, PROBLEM, world_size, chosen).plan()
    results["same plan"] = digest(plan) == digest(measured)
    with ContextParallel(plan=plan) as cp:
        q = torch.randn(1, len(cp.positions()), 2, 8)
        out = cp.attention(q, q, q)
        assert isinstance(out, torch.Tensor)
        results["finite"] = bool(out.isfinite().all())
    # Another problem is another question of the file; another cluster measures anew.
    other = Problem(64, 2, 8, mask=Mask(causal=True), element_bytes=4)
    results["other"] = (lambda x: (x.before, x.taken))(tuned(1, other))
    results["anew"] = (lambda x: (x.before, x.taken))(tuned(1, cluster=load_cluster("paper")))
    ranks.wait_for_all()
    results["questions"] = [question.problem.q_tokens for question in read_tuned(file).answers]
    results |= replaced(rank, folder) | refusals(rank, folder)
    tune_module.contenders = contenders
    results["refused"] = [
        raised_by(lambda: tune_ranks(ranks, PROBLEM, cluster, {"x": 1}, output=output)),
        raised_by(lambda: tune_ranks(ranks, PROBLEM, cluster, output=f"{folder}/no/tuned.json")),
    ]
    if rank == 0:
        Path(folder, "mine.toml").write_text("a = 1")
    results["refused"].append(
        raised_by(lambda: tune_ranks(ranks, PROBLEM, cluster, output=f"{folder}/mine.toml"))
    )
    return results


def replaced(rank: int, folder: str) -> dict[str, Any]:
    """A slower answer does not take the place of one that was measured faster."""
    ranks = ranks_of_group(None, CPU)
    took = [1e-3]
    measure, tune_module.plan_seconds = (
        tune_module.plan_seconds,
        lambda *_, **__: dict.fromkeys(Direction, took[0]),
    )

    def tuned(cluster: str, **how: Any) -> tuple[bool, float]:
        how |= {"output": Path(folder, "replaced.json"), "measurements": 1}
        outcome = tune_ranks(ranks, PROBLEM, load_cluster(cluster), OPTIONS, **how)
        return outcome.stays, outcome.answer.seconds

    outcomes = [tuned("hgx-h100")]
    for seconds, cluster, again in ((2e-3, "paper", False), (5e-4, "hgx-h200", False)):
        took[0] = seconds
        outcomes.append(tuned(cluster, again=again))
    took[0] = 3e-3
    outcomes.append(tuned("hgx-h200", again=True))
    tune_module.plan_seconds = measure
    return {"replaced": outcomes}


def refusals(rank: int, folder: str) -> dict[str, Any]:
    """What ends a tuning, and what is noted of a setting."""
    ranks = ranks_of_group(None, CPU)
    output = Path(folder, "refusals.json")
    cluster = load_cluster("hgx-h100")
    results: dict[str, Any] = {}
    measure = tune_module.plan_seconds
    lines: list[str] = []
    kinds: list[Exception | None] = []

    def may_fail(*args: Any, **how: Any) -> Any:
        error = kinds.pop(0) if kinds else None
        if error is not None:
            raise error
        return dict.fromkeys(Direction, 1e-3)

    def tuned() -> Any:
        return tune_ranks(
            *(ranks, PROBLEM, cluster, OPTIONS),
            output=output,
            measurements=3,
            tell_line=lines.append,
        )

    def entry() -> tuple[bool, dict[str, float | str]]:
        ranks.wait_for_all()
        tuned_entry = read_entries(output)[wanted(PROBLEM, ranks.size, OPTIONS)]
        ranks.wait_for_all()
        return tuned_entry.answer is not None, tuned_entry.measured

    tune_module.plan_seconds = may_fail
    try:
        for error in (CommunicationError("rank 1 has ended"), RuntimeError("Connection closed")):
            kinds[:] = [None, error]
            with pytest.raises(type(error), match=str(error)):
                tuned()
            results.setdefault("ended_with", []).append(entry())
        kinds[:] = [KernelRefusedError("no kernel can do this")]
        outcome = tuned()
        results["noted"] = (
            outcome.taken,
            outcome.before,
            sorted({x for x in outcome.tuning.known.values() if isinstance(x, str)}),
            entry(),
        )
        results["lines"] = lines
    finally:
        tune_module.plan_seconds = measure

    def refuses() -> int:
        if rank == 0:
            raise PlanError("only here")
        return 1

    def refuse_differently() -> int:
        raise PlanError("this") if rank == 0 else torch.OutOfMemoryError("that")

    results["one_rank"] = raised_by(lambda: attempt(ranks, refuses, patience=0.2)).error
    results["differ"] = raised_by(lambda: attempt(ranks, refuse_differently)).error

    def all_refuse() -> int:
        raise PlanError(f"as rank {rank} says")

    assert attempt(ranks, all_refuse) == Refusal("as rank 0 says")
    return results


def test_only_a_refusal_of_the_setting_is_one() -> None:
    for error in (PlanError("a"), KernelRefusedError("b\n c"), torch.OutOfMemoryError("d")):
        reason = reason_of(error)
        assert reason is not None
        assert " ".join(str(error).split()) in reason
        assert "\n" not in reason
    others = (MeshAttentionError, CommunicationError, LostStoreError, DisagreementError)
    for kind in (*others, RuntimeError, dist.DistBackendError, ValueError, MemoryError):
        assert reason_of(kind("a rank has ended")) is None


def test_a_refusal_leaves_what_has_run() -> None:
    every = few(PROBLEM, 2, load_cluster("hgx-h100"), OPTIONS)
    forward, backward = (every[direction][0] for direction in Direction)
    tuning = Tuning(every, {forward.key: 1.0})
    tuning.refuse((forward, backward), "why")
    assert tuning.known == {forward.key: 1.0, backward.key: "why"}


def test_all_ranks_choose_the_same_and_the_file_has_it(pool: WorkerPool, tmp_path: Path) -> None:
    rank_results = pool.run(tune, 2, str(tmp_path), seconds=300)
    first = rank_results[0]
    own = dict.fromkeys(("refused", "differ", "one_rank", "no answer yet"))
    for result in rank_results[1:]:
        assert {**result, **own} == {**first, **own}
    assert first["ended"] == 3
    assert all(
        "has no answer for 48 tokens" in result["no answer yet"].error for result in rank_results
    )
    before, taken, best, steps = first["went_on"]
    assert before == 2
    assert taken >= 1
    assert len(best) == 2
    assert steps[0] == (2, 4)
    assert first["known"] == (before + taken, 0, False)
    assert first["same plan"]
    assert first["finite"]
    assert first["other"] == first["anew"] == (0, 1)
    assert first["questions"] == [48, 64]
    stays = [(False, 2e-3), (True, 2e-3), (False, 1e-3), (False, 6e-3)]
    assert first["replaced"] == [(kept, pytest.approx(seconds)) for kept, seconds in stays]
    assert [len(measured) for _, measured in first["ended_with"]] == [2, 4]
    for has_answer, measured in first["ended_with"]:
        assert not has_answer
        assert not any(isinstance(measurement, str) for measurement in measured.values())
    taken, before, reasons, (has_answer, measured) = first["noted"]
    assert (taken + before, reasons, has_answer) == (3, ["no kernel can do this"], True)
    assert "no kernel can do this" in measured.values()
    assert sum("cannot run: forward" in line for line in first["lines"]) == 1
    assert sum("of at most 3: forward" in line for line in first["lines"]) == 3
    assert "only here" in first["one_rank"]
    assert not any(result["one_rank"] for result in rank_results[1:])
    assert all("not all ranks say the same" in result["differ"] for result in rank_results)
    for result in rank_results:
        option, folder, damaged = (each.error for each in result["refused"])
        assert "no method has an option 'x'" in option
        assert "No such file" in folder
        assert "mine.toml is not a file of mesh-attention tune" in damaged
    names = sorted(file.name for file in tmp_path.iterdir())
    assert names == ["mine.toml", "refusals.json", "replaced.json", "tuned.json"]
    assert (tmp_path / "mine.toml").read_text() == "a = 1"


def test_it_says_how_it_is_started(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert main(["tune"]) == 2
    assert "--output is missing" in capsys.readouterr().err
    assert main(["tune", "--output", "tuned.json"]) == 2
    assert "torchrun --nproc-per-node 8 -m mesh_attention tune" in capsys.readouterr().err
    assert main(["tune", "--method", "ring"]) == 2
    assert "leave --method out" in capsys.readouterr().err
