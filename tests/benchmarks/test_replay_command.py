"""`benchmarks/replay_rank.py` without a GPU: what it asks for, what it refuses, what it says."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from replay import measure as measuring
from replay.rank import RankToReplay, Replayed
from replay_rank import main

from mesh_attention.plan.language.plan import Direction

SMALL = "--cluster paper --ranks 16 --tokens 8192 --heads 16 --causal"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[RankToReplay, dict[str, Any]]]:
    """A GPU that takes twice as long as the simulator says, half of it for computation."""
    calls: list[tuple[RankToReplay, dict[str, Any]]] = []

    def pretend(part: RankToReplay, **options: Any) -> Replayed:
        calls.append((part, options))
        lasts = 2 * part.predicted["runtime_seconds"]
        return Replayed(
            machine="a GPU",
            part=part,
            sms=options["sms"],
            high_priority=options["high_priority"],
            seconds=lasts,
            all_seconds=(lasts,) * options["repeats"],
            compute_seconds=lasts / 2,
            peak_bytes=3 * 2**20,
            workspace_bytes=2**20,
            planned_scratch_bytes=2**20,
            mask_bytes=2**10,
            stand_in_bytes=0,
            kernels=("some",),
        )

    monkeypatch.setattr(measuring, "check_device", lambda sms: torch.device("cpu"))
    monkeypatch.setattr(measuring, "measure", pretend)
    monkeypatch.setattr(measuring, "with_kernels_here", lambda cluster: cluster)
    return calls


def test_without_cuda_it_says_so_before_it_plans(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["--ranks", "256", "--tokens", "524288"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert "needs a CUDA GPU" in err
    assert "mesh-attention simulate" in err


def test_options_reach_the_measurement(
    asked: list[tuple[RankToReplay, dict[str, Any]]], capsys: pytest.CaptureFixture[str]
) -> None:
    line = f"{SMALL} --pass forward --rank 3 --sms 24 --repeats 2 --same-priority --json"
    assert main([*line.split(), "--kernel", "cudnn"]) == 0
    facts = json.loads(capsys.readouterr().out)
    ((part, options),) = asked
    assert part.rank == facts["rank"] == 3
    assert part.pass_.direction is Direction.FORWARD
    assert options == {"sms": 24, "repeats": 2, "high_priority": False, "kernel": "cudnn"}
    assert facts["predicted_kernels"] == ["cudnn"]
    assert (facts["compute"], facts["network"]) == ("measured", "modelled")


def test_both_passes_with_their_bounds(
    asked: list[tuple[RankToReplay, dict[str, Any]]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*SMALL.split(), "--json"]) == 0
    both = json.loads(capsys.readouterr().out)
    assert list(both) == ["forward", "backward"]
    for results in both.values():
        assert results["seconds"] == pytest.approx(2 * results["predicted_seconds"])
        assert results["exposed_seconds"] == pytest.approx(results["seconds"] / 2)
        assert results["compute_mfu_percent"] == pytest.approx(2 * results["mfu_percent"])
        assert results["mfu_percent"] == pytest.approx(results["predicted_mfu_percent"] / 2)
    assert asked[0][1] == {"sms": 16, "repeats": 5, "high_priority": True, "kernel": None}


def test_people_read_what_is_measured_and_what_is_modelled(
    asked: list[tuple[RankToReplay, dict[str, Any]]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*SMALL.split(), "--method", "usp", "--ulysses", "4"]) == 0
    out = capsys.readouterr().out
    assert "usp on 16 ranks of paper, one of them replayed on a GPU" in out
    assert "Compute measured, network modelled" in out
    for title in ("time", "bound: compute alone", "predicted by simulate", "MFU", "peak memory"):
        assert title in out
    assert main([*SMALL.split(), "--sms", "0"]) == 0
    assert "as copy engines do" in capsys.readouterr().out


def test_the_best_setting_can_be_searched(
    asked: list[tuple[RankToReplay, dict[str, Any]]], capsys: pytest.CaptureFixture[str]
) -> None:
    line = "--ranks 4 --tokens 2048 --heads 4 --best --pass forward --json"
    assert main(line.split()) == 0
    facts = json.loads(capsys.readouterr().out)
    assert main(line.replace(" --best", "").split()) == 0
    plain = json.loads(capsys.readouterr().out)
    assert facts["predicted_seconds"] <= plain["predicted_seconds"]


@pytest.mark.parametrize(
    ("rest", "way_out"),
    [
        ("--rank 16", "the plan has ranks 0 to 15; or give slowest"),
        ("--cluster nowhere", "neither a file nor one of"),
        ("--tile 3x4", "tile"),
        ("--rank first", "neither the number of a rank nor slowest"),
        ("--sms -1", "at least 0"),
        ("--repeats 0", "at least 1"),
    ],
)
def test_what_no_gpu_could_run_is_refused(
    rest: str,
    way_out: str,
    asked: list[tuple[RankToReplay, dict[str, Any]]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*SMALL.split(), *rest.split()]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert way_out in err
