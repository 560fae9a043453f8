"""Every program in `examples/` runs and shows what it says.

Those for torchrun run in the pool's processes, which have imported torch already; the README's own
example runs by torchrun itself.
"""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest

from support.pool import WorkerPool

FOLDER = Path(__file__).parents[2] / "examples"


def run_example(rank: int, world_size: int, name: str, *arguments: str) -> str:
    """What a rank prints. The group is the pool's: the program neither makes nor ends it."""
    main: Callable[..., None] = runpy.run_path(str(FOLDER / name))["main"]
    local = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size}
    local["LOCAL_WORLD_SIZE"] = world_size
    printed = io.StringIO()
    with (
        patch("torch.distributed.init_process_group"),
        patch("torch.distributed.destroy_process_group"),
        patch.dict(os.environ, {name: str(number) for name, number in local.items()}),
        contextlib.redirect_stdout(printed),
    ):
        main(*([arguments] if arguments else []))
    return printed.getvalue()


@pytest.mark.parametrize("ranks", [2, 4])
def test_one_step_equals_one_process_and_says_so_on_every_rank(
    pool: WorkerPool, ranks: int
) -> None:
    for rank, printed in enumerate(pool.run(run_example, ranks, "one_step.py")):
        assert printed.startswith(f"rank {rank} of {ranks}: ")
        assert float(printed.split()[-1]) < 1e-4


def test_a_plan_is_looked_at_without_torch() -> None:
    script = (
        f"import runpy, sys; runpy.run_path({str(FOLDER / 'look_at_a_plan.py')!r}, "
        "run_name='__main__'); sys.exit('torch' in sys.modules)"
    )
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("a rank receives") == 4
    assert "C-2-2" in run.stdout


def test_every_example_is_run_here_and_says_how_to_run_it() -> None:
    tests = "".join(file.read_text() for file in Path(__file__).parent.glob("test_*.py"))
    table = (FOLDER / "README.md").read_text()
    for file in FOLDER.glob("*.py"):
        assert file.name in tests
        about = file.read_text().split('"""')[1]
        assert f"examples/{file.name}\n" in about
        assert f"| `{file.name}` |" in table
        if "torch" in file.read_text().split('"""')[2]:
            assert "    torchrun --nproc-per-node" in about
            assert "    srun --nodes 2 " in about


def test_documents_of_every_step_are_right_and_say_what_was_chosen(pool: WorkerPool) -> None:
    first, *others = pool.run(run_example, 4, "documents.py")
    assert not any(others)
    lines = first.splitlines()
    assert len(lines) == 8
    assert all("documents of" in line for line in lines[::2])
    assert all(float(line.split()[-1]) < 1e-4 for line in lines[1::2])


def test_the_way_from_ring_flash_attention_gives_the_same_numbers(pool: WorkerPool) -> None:
    first, *others = pool.run(run_example, 4, "migrate_from_ring_flash_attention.py")
    assert not any(others)
    lines = first.splitlines()
    assert len(lines) == 5
    assert all(float(line.split()[-1]) < 1e-5 for line in lines)
    assert sum("_there" in line for line in lines) == 2
