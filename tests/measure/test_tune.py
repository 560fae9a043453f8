"""`tune` on real processes: the same choice everywhere, kept for `auto`, and gone on with after an
end. No test is about a time."""

from __future__ import annotations

import json
import os
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import mesh_attention.measure.tune
from mesh_attention import ContextParallel, Mask, Problem
from mesh_attention.choose.answers import VARIABLE, is_measured, kept_answer, search_and_keep
from mesh_attention.choose.best import candidate
from mesh_attention.choose.contenders import Contender, contenders
from mesh_attention.choose.search import a_search
from mesh_attention.choose.tuning import Tuning
from mesh_attention.cli.main import main
from mesh_attention.cost.machine.cluster import Cluster
from mesh_attention.cost.machine.load import load_cluster
from mesh_attention.errors import MeshAttentionError, PlanError
from mesh_attention.kernels.registry import KernelRefusedError
from mesh_attention.measure.attempts import Attempts, Refusal, reason_of
from mesh_attention.measure.ranks import ranks_of_group
from mesh_attention.measure.tune import keep_tuned, tune_ranks
from mesh_attention.measure.tuning_state import TuningState
from mesh_attention.plan.plan import Direction
from mesh_attention.plan.text import digest
from mesh_attention.runtime.handshake import DisagreementError
from mesh_attention.runtime.transport.distributed import CommunicationError
from mesh_attention.runtime.transport.job_store import LostStoreError
from support.pool import WorkerPool
from support.raised import raised_by

CPU = torch.device("cpu")
tune_module: Any = mesh_attention.measure.tune
PROBLEM = Problem(48, 2, 8, mask=Mask(causal=True), element_bytes=4)
SIZES: dict[str, Any] = {
    "seq_len": 48,
    "num_heads": 2,
    "head_dim": 8,
    "causal": True,
    "dtype": torch.float32,
}
OPTIONS: dict[str, Any] = {"layout": "zigzag"}  # one place for all


def few(problem: Problem, num_ranks: int, cluster: Cluster, options: Any) -> Any:
    """In place of a search: settings that take a moment to find."""
    every = {}
    for direction in Direction:
        search = a_search(problem, num_ranks, cluster, direction, options)
        uncut: dict[str, Any] = {"chunks": (1, 1)}
        settings = [("mesh", {}), ("ring", {}), ("ulysses", {}), ("mesh", uncut)]
        made = [candidate(search, name, one | options) for name, one in settings]
        every[direction] = [
            Contender(direction, one.name, one.options, 1.0 + at / 100, one.place)
            for at, one in enumerate(made)
        ]
    return every


def tune(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    os.environ[VARIABLE] = f"{folder}/first" if rank == 0 else f"{folder}/others"
    ranks = ranks_of_group(None, CPU)
    cluster = load_cluster("hgx-h100")
    found: dict[str, Any] = {}

    def tuned(measurements: int, **how: Any) -> Any:
        return tune_ranks(
            *(ranks, PROBLEM, cluster, OPTIONS), measurements=measurements, lasting=0.0, **how
        )

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
        found["ended"] = len(made)
    finally:
        tune_module.plan_seconds = measure
    steps: list[tuple[int, int]] = []
    one = tuned(4, progress=lambda *at: steps.append(at))
    found["went_on"] = one.before, one.taken, [x.key for x in one.best], steps
    found["measured"] = one.tuning.measured
    found["known"] = (lambda x: (x.before, x.taken))(tuned(4))
    # Another cluster has a file of its own; the answer is kept for one with other nodes where all
    # ranks are on one node anyway.
    larger = load_cluster("gb200-nvl72")
    small = replace(cluster.node, ranks=1), replace(cluster.network, nics=1)
    smaller = replace(cluster, node=small[0], network=small[1])
    for name, also_for in (("larger", larger), ("smaller", smaller)):
        one = tuned(1, also_for=also_for)
        found[name] = one.before, one.taken, len(one.kept_in)
    other = tune_ranks(ranks, PROBLEM, larger, OPTIONS, measurements=1, lasting=0.0, again=True)
    found["other"] = other.before, other.taken, len(other.kept_in)
    with ContextParallel(cluster="hgx-h100", method="auto", **SIZES, **OPTIONS) as cp:
        q = torch.randn(1, len(cp.positions()), 2, 8)
        out = cp.attention(q, q, q)
        assert isinstance(out, torch.Tensor)
        found["used"] = digest(cp.plan), cp.choice, bool(out.isfinite().all())
    found |= refusals(rank, folder)
    tune_module.contenders = contenders
    found["refused"] = raised_by(
        lambda: tune_ranks(ranks, PROBLEM, load_cluster("paper"), {"x": 1})
    )
    return found


def refusals(rank: int, folder: str) -> dict[str, Any]:
    """What ends a tuning, and what is noted of a setting."""
    os.environ[VARIABLE] = f"{folder}/refusals"
    ranks = ranks_of_group(None, CPU)
    cluster = load_cluster("hgx-h100")
    found: dict[str, Any] = {}
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
            *(ranks, PROBLEM, cluster, OPTIONS), measurements=3, tell_line=lines.append
        )

    def files() -> list[str]:
        ranks.wait_for_all()
        there = sorted(Path(folder, "refusals").glob("*.json"))
        ranks.wait_for_all()
        return [one.read_text() for one in there]

    tune_module.plan_seconds = may_fail
    try:
        for error in (CommunicationError("rank 1 has ended"), RuntimeError("Connection closed")):
            kinds[:] = [None, error]
            with pytest.raises(type(error), match=str(error)):
                tuned()
            found.setdefault("ended_with", []).append(files())
        kinds[:] = [KernelRefusedError("no kernel can do this")]
        one = tuned()
        found["noted"] = one.taken, one.before, sorted(set(one.tuning.refused.values())), files()
        found["lines"] = lines
    finally:
        tune_module.plan_seconds = measure
    impatient, attempts = Attempts(ranks, patience=0.2), Attempts(ranks)

    def refuses() -> int:
        if rank == 0:
            raise PlanError("only here")
        return 1

    def refuse_differently() -> int:
        raise PlanError("this") if rank == 0 else torch.OutOfMemoryError("that")

    found["one_rank"] = raised_by(lambda: impatient.make(refuses)).error
    found["differ"] = raised_by(lambda: attempts.make(refuse_differently)).error

    def all_refuse() -> int:
        raise PlanError(f"as rank {rank} says")

    assert attempts.make(all_refuse) == Refusal("as rank 0 says")
    return found


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
    assert tuning.measured == {forward.key: 1.0, backward.key: float("inf")}
    assert tuning.refused == {backward.key: "why"}


def test_a_slower_tuning_does_not_replace_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    cluster = load_cluster("hgx-h100")
    every = few(PROBLEM, 2, cluster, OPTIONS)

    def keep(at: int, seconds: float, *, replace: bool = False) -> Any:
        pair = every[Direction.FORWARD][at], every[Direction.BACKWARD][at]
        tuning = Tuning(every, {one.key: seconds for one in pair})
        clusters = (cluster, cluster)
        return keep_tuned(PROBLEM, 2, clusters, tuning, pair, OPTIONS, replace=replace)

    def kept() -> tuple[str, float]:
        one = (kept_answer(PROBLEM, 2, cluster, OPTIONS) or {})["forward"]
        return one["method"], one["seconds"]

    search_and_keep(PROBLEM, 2, cluster, OPTIONS)
    files, stayed = keep(0, 1e3)  # what was not measured is replaced
    assert (len(files), stayed, kept()) == (1, (), ("mesh", 1e3))
    assert (*map(len, keep(1, 2e-3)), kept()) == (1, 0, ("ring", 2e-3))
    files, stayed = keep(2, 3e-3)
    assert (files, len(stayed), kept()) == ((), 1, ("ring", 2e-3))
    assert "ring" in stayed[0]
    assert "4.00 ms" in stayed[0]
    assert "6.00 ms" in stayed[0]
    assert "--again" in stayed[0]
    assert (*map(len, keep(2, 3e-3, replace=True)), kept()) == (1, 0, ("ulysses", 3e-3))


def test_all_ranks_choose_the_same_and_auto_uses_it(pool: WorkerPool, tmp_path: Path) -> None:
    found = pool.run(tune, 2, str(tmp_path), seconds=300)
    first = found[0]
    own = dict.fromkeys(("used", "refused", "differ", "one_rank"))
    for one in found[1:]:
        assert {**one, **own} == {**first, **own}
        assert one["used"][0] == first["used"][0]
    assert first["ended"] == 3
    before, taken, best, steps = first["went_on"]
    assert before == 2
    assert taken >= 1
    assert len(best) == 2
    assert steps[0] == (2, 4)
    assert first["known"] == (before + taken, 0)
    known = before + taken
    assert (first["larger"], first["smaller"]) == ((known, 0, 2), (known, 0, 1))
    assert first["other"] == (0, 1, 1)
    one_run, still_one = first["ended_with"]
    assert len(one_run) == 1  # what was measured, and no answer
    assert len(still_one) == 1
    assert "cannot_run" not in "".join(one_run + still_one)
    taken, before, reasons, told = first["noted"]
    assert (taken + before, reasons, len(told)) == (3, ["no kernel can do this"], 2)
    assert "no kernel can do this" in "".join(told)
    assert sum("cannot run: forward" in line for line in first["lines"]) == 1
    assert sum("of at most 3: forward" in line for line in first["lines"]) == 3
    assert "only here" in first["one_rank"]
    assert not any(one["one_rank"] for one in found[1:])
    assert all("not all ranks say the same" in one["differ"] for one in found)
    _, choice, finite = first["used"]
    assert finite
    assert "tuned answer of auto" in choice
    assert all("x" in one["refused"].error for one in found)
    files = sorted(file.name for file in (tmp_path / "first").iterdir())
    assert [name.startswith("tuning-") for name in files] == [False, False, True, True]
    assert not (tmp_path / "others").exists()  # the first rank reads and writes
    before_env, os.environ[VARIABLE] = os.environ[VARIABLE], str(tmp_path / "first")
    try:
        kept = kept_answer(PROBLEM, 2, "hgx-h100", OPTIONS)
        assert is_measured(kept)
        # A search does not replace what was measured.
        search_and_keep(PROBLEM, 2, "hgx-h100", OPTIONS)
        assert kept_answer(PROBLEM, 2, "hgx-h100", OPTIONS) == kept
    finally:
        os.environ[VARIABLE] = before_env


@pytest.mark.parametrize(
    "damage",
    [
        "{",
        "[1, 2]",
        json.dumps({"version": 0}),
        json.dumps({"version": 2, "asked": {}, "measured": {}}),
        json.dumps({"version": 2, "asked": {"n": 1}, "measured": {"a": "fast"}}),
        json.dumps({"version": 2, "asked": {"n": 1}, "measured": {"a": -1.0}}),
        json.dumps({"version": 2, "asked": {"n": 1}, "measured": {"a": None}}),
        json.dumps({"version": 2, "asked": {"n": 1}, "measured": {"a": {}}}),
    ],
)
def test_a_damaged_state_is_told_and_ignored(
    damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    state = TuningState({"n": 1})
    state.prepare()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert state.read() == {}
        state.write({"a": 1.5, "b": "no kernel"})
        assert TuningState({"n": 1}).read() == {"a": 1.5, "b": "no kernel"}
        assert TuningState({"n": 2}).read() == {}
    state.file.write_text(damage)
    with pytest.warns(UserWarning, match="is ignored"):
        assert state.read() == {}


def test_it_says_how_it_is_started(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert main(["tune"]) == 2
    assert "torchrun --nproc-per-node 8 -m mesh_attention tune" in capsys.readouterr().err
    assert main(["tune", "--method", "ring"]) == 2
    assert "leave --method out" in capsys.readouterr().err
