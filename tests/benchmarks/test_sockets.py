"""Ranks of `benchmarks/sockets.py` without a GPU: their environment, what is heard, and MPS."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import sockets
import torch
from peer_cell import truth
from rank_processes import LaunchError
from sockets import Sockets, socket_environment
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from mesh_attention import Mask

HERE = Path(__file__).parents[2] / "benchmarks"


def test_every_rank_is_a_node_of_its_own_on_the_loopback() -> None:
    environments = [socket_environment(rank, 8, "nccl", 1234) for rank in range(8)]
    assert len({variables["NCCL_HOSTID"] for variables in environments}) == 8
    assert [variables["RANK"] for variables in environments] == [str(rank) for rank in range(8)]
    for variables in environments:
        assert (variables["LOCAL_RANK"], variables["LOCAL_WORLD_SIZE"]) == ("0", "1")
        assert {variables["NCCL_SOCKET_IFNAME"], variables["GLOO_SOCKET_IFNAME"]} == {"lo"}
        assert (variables["MASTER_ADDR"], variables["MASTER_PORT"]) == ("127.0.0.1", "1234")
        assert "CUDA_VISIBLE_DEVICES" not in variables
    assert socket_environment(0, 8, "gloo", 1234)["CUDA_VISIBLE_DEVICES"] == ""


SPEAKS = """
import os, sys
print("rank", os.environ["RANK"], flush=True)
print("said", file=sys.stderr, flush=True)
"""
FAILS = SPEAKS + "sys.exit('no memory' if os.environ['RANK'] == '1' else 0)"


def test_what_ranks_write_is_heard_also_if_one_fails() -> None:
    said: list[str] = []
    heard: list[list[str]] = []
    with Sockets(2, "gloo", said.append) as ranks:
        command = (sys.executable, "-c", SPEAKS)
        outputs = ranks.run(command, seconds=60, heard=heard.append)
        assert outputs == heard[-1] == ["rank 0\n", "rank 1\n"]
        assert "said" in said
        with pytest.raises(LaunchError, match=r"rank 1 ended with 1[\s\S]*no memory"):
            ranks.run((sys.executable, "-c", FAILS), seconds=60, heard=heard.append)
        assert heard[-1][1] == "rank 1\n"
        waits = (sys.executable, "-c", "import time; time.sleep(600)")
        with pytest.raises(LaunchError, match="not done after 0 s; still running: ranks 0 1"):
            ranks.run(waits, seconds=0.2)


@pytest.mark.parametrize("fails", [False, True])
def test_mps_is_started_where_it_is_there_and_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    program, log = tmp_path / "nvidia-cuda-mps-control", tmp_path / "log"
    program.write_text(f'#!/bin/sh\necho "$1 $(cat) $CUDA_MPS_PIPE_DIRECTORY" >> {log}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(sockets, "probe_gpu", lambda env: "no MPS here" if fails and env else "")
    with Sockets(2, "nccl", lambda line: None) as ranks:
        environment = ranks._started(0, ("true",))[1]
        pipe = Path(log.read_text().split()[1])
        assert fails == (environment.get("CUDA_MPS_PIPE_DIRECTORY") != str(pipe))
        assert ("no MPS here" if fails else "at once (MPS)") in ranks.shares_gpu
    begun, ended = log.read_text().splitlines()
    assert begun.startswith("-d ")
    assert ended.split() == ["quit", str(pipe)]
    assert not pipe.exists()


def test_nccl_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "probe_gpu", lambda mps: "no NVIDIA driver")
    monkeypatch.setenv("PATH", "")
    ranks = Sockets(2, "nccl", lambda line: None)
    with pytest.raises(LaunchError, match="need a CUDA GPU: no NVIDIA driver"):
        ranks.__enter__()


@pytest.mark.parametrize("causal", [True, False])
def test_the_truth_in_blocks_of_queries_is_that_of_all_at_once(causal: bool) -> None:
    chance = torch.Generator().manual_seed(1)
    whole = [torch.randn(1, 21, heads, 8, generator=chance) for heads in (4, 2, 2, 4)]
    *leaves, grad = (x.double().requires_grad_() for x in whole)
    q, k, v = (x.transpose(1, 2) for x in leaves)
    out = scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True).transpose(1, 2)
    wanted: list[Tensor] = [out.detach(), *torch.autograd.grad(out, leaves, grad)]
    in_blocks = truth(whole, Mask(causal=causal), pairs=4 * 21 * 5)
    for result, expected in zip(in_blocks, wanted, strict=True):
        torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
def test_all_methods_run_over_sockets_of_gloo(tmp_path: Path) -> None:
    """Profile, search, comparison with float64 and steps of all plans; nothing about times."""
    file = tmp_path / "result.json"
    sizes = {"tokens": 256, "heads": "8:8", "dim": 16, "rounds": 1, "seconds": 1500}
    options = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    command = (sys.executable, str(HERE / "predicted_against_measured.py"), "--sockets", "gloo")
    done = subprocess.run(
        (*command, *options, "--json", str(file)), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(file.read_text())
    methods = {"ring", "usp", "ulysses", "startrail", "mesh", "mesh-usp", "allgather-kv", "auto"}
    assert set(result["verdict"]["measured_order"]) == set(result["verdict"]["ratios"]) == methods
    assert str(tmp_path) not in file.read_text()
