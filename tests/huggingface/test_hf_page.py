"""`docs/models.md` has the models that tests show, and its names are loaded when used."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from mesh_attention import MeshAttentionError, huggingface
from support.model_table import BEGIN, END, as_page, table
from support.pool import WorkerPool

ROOT = Path(__file__).parents[2]
PAGE, TRL_PAGE = ((ROOT / "docs" / name).read_text() for name in ("huggingface.md", "trl.md"))
DATA = ROOT / "src/mesh_attention/huggingface/models.toml"
RESULT = ROOT / "benchmarks/results/2026-11-18-models.json"


def test_the_table_of_models_is_that_of_the_package_and_of_the_last_sweep() -> None:
    # Here, as it imports transformers: seconds in all processes that collect tests.
    from mesh_attention.huggingface.model_checks import DIFFERENT, REFUSED, SHOWN

    text = (ROOT / "docs/models.md").read_text().partition(BEGIN)[2].partition(END)[0]
    made = tomllib.loads(DATA.read_text())
    assert text == as_page(made)
    assert table(json.loads(RESULT.read_text())["types"]) == made
    assert len(SHOWN) >= 70
    assert not {*SHOWN} & {*REFUSED, *DIFFERENT}


def test_importing_the_package_imports_neither_transformers_nor_torch() -> None:
    """Need 15: nothing breaks where transformers is not there."""
    script = (
        "import sys, mesh_attention.huggingface as h; dir(h); "
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'accelerate')))"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_without_transformers_names_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("attention", "model_hooks", "model", "trainer"):
        monkeypatch.delitem(sys.modules, f"mesh_attention.huggingface.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "transformers", None)
    for name in ("register", "ModelContextParallel"):
        with pytest.raises(MeshAttentionError, match=r"pip install .transformers>="):
            getattr(huggingface, name)
    with pytest.raises(AttributeError, match="no attribute 'attend'"):
        huggingface.attend  # noqa: B018


def test_packages_that_were_not_tested_are_refused_or_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from transformers.utils import logging

    from mesh_attention.huggingface import accelerator as ranks

    monkeypatch.setattr(logging.get_logger(), "propagate", True)
    rows = {n: re.search(rf"^\| {n} \| (\S+) \| (\S+) \|$", PAGE, re.M) for n in ranks.TESTED}
    for package, (oldest, newest) in ranks.TESTED.items():
        row = rows[package]
        assert row is not None
        assert row.groups() == tuple("{}.{}.0".format(*x) for x in (oldest, newest))
        for installed in row.groups():
            monkeypatch.setattr(ranks, "version", lambda _, x=installed: x)
            ranks.check_version(package)
        assert not caplog.records
        monkeypatch.setattr(ranks, "version", lambda _, x=newest[1] + 1: f"1.{x}.0.dev0")
        for _ in range(2):
            ranks.check_version(package)
        [record] = caplog.records
        assert f"'{package}>={oldest[0]}.{oldest[1]},<1.{newest[1] + 1}'" in record.message
        caplog.clear()
        monkeypatch.setattr(ranks, "version", lambda _: "1.9.3")
        with pytest.raises(MeshAttentionError, match="too old; tested are"):
            ranks.check_version(package)


def as_on_the_page(rank: int, world_size: int, folder: str) -> tuple[float, float]:
    """The loss of the loop, and that of one process; the Trainer saves its model."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from support.tiny_models import PLAIN, make_model, on_one_process
    from support.tiny_trainer import RUNS, launched, padded
    from support.tiny_trl import RUNS as TRL_RUNS
    from support.tiny_trl import tokenizer

    with_trainer, with_loop, *_ = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    [with_trl] = re.findall(r"```python\n(.*?)```", TRL_PAGE, flags=re.DOTALL)
    model = make_model("gemma3_text")
    wanted = on_one_process(model, PLAIN)[0].item()
    mesh = init_device_mesh("cpu", (1, world_size), mesh_dim_names=("dp", "cp"))
    names: dict[str, Any] = {"model": model, "loader": [PLAIN.whole], "mesh": mesh}
    exec(with_loop, names)
    names["cp"].close()
    with launched(rank, world_size):
        trainer = RUNS["smoothed"].trainer(folder, world_size)
        trainer.close()
        of_trainer = {"model": make_model("llama"), "args": trainer.args, "collate": padded}
        of_trainer |= {"train": trainer.train_dataset, "test": trainer.eval_dataset}
        exec(with_trainer, of_trainer)
        dist.barrier()
    with launched(rank, world_size):
        of_trl = TRL_RUNS["completions, padded"].trainer(folder, 2, world_size // 2)
        of_trl.close()
        rows = {"args": of_trl.args, "train": of_trl.train_dataset, "tokenizer": tokenizer()}
        exec(with_trl, {"model": make_model("llama")} | rows)
    assert (Path(folder) / "model.safetensors").is_file()
    return names["mean"].value.item(), wanted


def test_what_the_page_says_to_type_runs(model_pool: WorkerPool, tmp_path: Path) -> None:
    for result, wanted in model_pool.run(as_on_the_page, 4, str(tmp_path)):
        assert result == pytest.approx(wanted, rel=1e-5)
