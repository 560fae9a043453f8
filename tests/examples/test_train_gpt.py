"""`examples/train_gpt.py` has the losses of one process by PyTorch alone, whoever wraps the model,
and goes on with the very same ones from a checkpoint, on any number of ranks."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import subprocess
import sys
from argparse import Namespace
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from test_examples import FOLDER, run_example
from torch import Tensor, nn
from torch.nn import functional

from support.pool import WorkerPool

FILE = FOLDER / "train_gpt.py"
STEPS, SAVED = 8, 3
SIZES = [
    "--steps",
    str(STEPS),
    "--tokens",
    "60",
    "--width",
    "32",
    "--layers",
    "1",
    "--rate",
    "0.02",
]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Easily learnt."""
    file = tmp_path_factory.mktemp("text") / "text"
    file.write_bytes(b"abcdefgh" * 40)
    return file


def losses(printed: list[str]) -> list[float]:
    first, *others = printed
    assert not any(others)
    results: list[float] = json.loads(first)["losses"]
    return results


@pytest.fixture(scope="module")
def trained(pool: WorkerPool, text: Path) -> tuple[Path, list[float]]:
    """On data-parallel by context-parallel ranks, two by two; and its checkpoints."""
    folder = text.parent / "checkpoints"
    flags = [*SIZES, "--text", str(text), "--checkpoints", str(folder), "--save-every", str(SAVED)]
    return folder, losses(pool.run(run_example, 4, FILE.name, *flags, "--json"))


class OneProcess(nn.Module):
    """Attention row by row, document by document."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: list[list[int]]) -> Tensor:
        rows = []
        for row, starts in enumerate(cu_seqlens):
            outs = [
                functional.scaled_dot_product_attention(
                    q[row, a:b].transpose(0, 1),
                    k[row, a:b].transpose(0, 1),
                    v[row, a:b].transpose(0, 1),
                    is_causal=True,
                    enable_gqa=True,
                ).transpose(0, 1)
                for a, b in pairwise(starts)
            ]
            rows.append(torch.cat(outs))
        return torch.stack(rows)


def on_one_process(rank: int, world_size: int, file: Path, arguments: list[str]) -> list[float]:
    names = runpy.run_path(str(file))
    args: Namespace = names["read"](arguments)
    model: Any = names["made"](args, OneProcess(), torch.device("cpu"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.rate)
    results = []
    for whole in names["packs"](args, 0, 1):
        ids, starts = whole["input_ids"], whole["cu_seqlens"]
        positions, targets = torch.zeros_like(ids), torch.full_like(ids, -100)
        for row, cuts in enumerate(starts):
            for a, b in pairwise(cuts):
                positions[row, a:b] = torch.arange(b - a)
                targets[row, a : b - 1] = ids[row, a + 1 : b]
        logits = model(ids, positions, starts)
        loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        results.append(loss.item())
    return results


def test_training_has_the_losses_of_one_process(
    pool: WorkerPool, text: Path, trained: tuple[Path, list[float]]
) -> None:
    """Need 9."""
    [alone] = pool.run(on_one_process, 1, FILE, [*SIZES, "--text", str(text)])
    many = trained[1]
    assert len(many) == len(alone) == STEPS
    assert all(abs(a - b) < 1e-4 for a, b in zip(many, alone, strict=True))
    assert many[-1] < many[0] / 2


@pytest.mark.parametrize(
    ("ranks", "more"),
    [
        (1, ["--wrap", "ddp"]),
        (2, ["--dp", "1", "--keep-attention"]),
        (4, ["--dp", "1", "--wrap", "ddp"]),
    ],
)
def test_a_checkpoint_goes_on_with_the_very_same_losses_on_any_number_of_ranks(
    pool: WorkerPool,
    tmp_path: Path,
    text: Path,
    trained: tuple[Path, list[float]],
    ranks: int,
    more: list[str],
) -> None:
    """Saved by FSDP2 on two by two ranks; there are one, two and four context-parallel ranks."""
    folder, wanted = trained
    shutil.copytree(folder / f"step-{SAVED}", tmp_path / f"step-{SAVED}")
    flags = [*SIZES, "--text", str(text), "--checkpoints", str(tmp_path), "--json", *more]
    results = losses(pool.run(run_example, ranks, FILE.name, *flags))
    assert results[:SAVED] == wanted[:SAVED]
    assert results[SAVED:] == pytest.approx(wanted[SAVED:], rel=1e-5)
    assert (tmp_path / f"step-{STEPS}" / ".metadata").exists()


def refused(rank: int, world_size: int, *arguments: str) -> str:
    try:
        run_example(rank, world_size, FILE.name, *arguments)
    except SystemExit as ended:
        return str(ended)
    return "nothing"


def test_a_checkpoint_of_another_run_is_refused(
    pool: WorkerPool, text: Path, trained: tuple[Path, list[float]]
) -> None:
    flags = [*SIZES, "--text", str(text), "--checkpoints", str(trained[0]), "--seed", "1"]
    assert "is of another run" in pool.run(refused, 1, *flags)[0]


def test_the_losses_are_drawn_and_printed(pool: WorkerPool, text: Path, tmp_path: Path) -> None:
    picture = tmp_path / "loss.png"
    flags = [*SIZES, "--text", str(text), "--steps", "2", "--plot", str(picture)]
    [printed] = pool.run(run_example, 1, FILE.name, *flags)
    assert "step 2: loss" in printed
    assert "1 data-parallel by 1 context-parallel ranks, fsdp" in printed
    assert "█▁" in printed
    assert picture.stat().st_size > 5_000


WRONG = {
    "--dp 3": "must divide the 4 ranks",
    "--packs 1": "be at most --packs",
    "--kv-heads 3": "must divide --heads",
    "--steps 0": "--steps must be at least 1",
    "--text nowhere": "is no file",
    "--rate nan": "must be positive and finite",
    "--plot nowhere/x.png": "there is no folder nowhere",
    f"--checkpoints {FILE}/x": "cannot be made",
}


def test_it_starts_its_ranks_itself_and_refuses_what_does_not_fit(
    capsys: pytest.CaptureFixture[str],
) -> None:
    main = runpy.run_path(str(FILE))["main"]
    with patch("subprocess.call", return_value=7) as call, patch.dict(os.environ, clear=False):
        for name in ("RANK", "WORLD_SIZE"):
            os.environ.pop(name, None)
        with pytest.raises(SystemExit) as ended:
            main(["--steps", "2"])
        assert ended.value.code == 7
        [command] = call.call_args.args
        assert command[1:3] == ["-m", "torch.distributed.run"]
        assert command[-3:] == [str(FILE), "--steps", "2"]
        for wrong, message in WRONG.items():
            with pytest.raises(SystemExit):
                main(["--ranks", "4", *wrong.split()])
            assert message in capsys.readouterr().err
    assert call.call_count == 1


@pytest.mark.slow
@pytest.mark.parametrize("wrap", ["fsdp", "ddp"])
def test_it_runs_by_itself(wrap: str) -> None:
    run = subprocess.run(
        [sys.executable, str(FILE), "--wrap", wrap, "--steps", "3", "--json"],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    facts = json.loads(run.stdout)
    assert (facts["dp"], facts["cp"], len(facts["losses"])) == (2, 2, 3)
