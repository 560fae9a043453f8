"""Ranks on this computer: processes joined by gloo that hold methods against float64 attention.

Only they import torch, not the process of the command.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from datetime import timedelta
from importlib.util import find_spec
from itertools import count
from typing import Any, NamedTuple

from mesh_attention.cli.output import progress
from mesh_attention.errors import MeshAttentionError
from mesh_attention.plan.problem.mask import Mask

_TIMEOUT = timedelta(seconds=100)
# Gradients import the last of these, for half a second on each rank.
_NEEDED = ("mesh_attention.api.context_parallel", "torch.fx.experimental.symbolic_shapes")


class CheckedCase(NamedTuple):
    """Units of all ranks, counted at the transport and by the plan, and the largest errors."""

    counted_units: float
    planned_units: float
    output_error: float
    gradient_error: float


@contextmanager
def local_ranks(num_ranks: int, num_cases: int) -> Iterator[Callable[..., CheckedCase]]:
    """Yields `check(name, mask, options, **sizes)`. As ranks communicate in a case, none of its
    tasks ends before all have begun, and each process takes one of them. `num_cases` cases fill the
    bar; without a bar, standard error says what was checked."""
    if find_spec("torch") is None:  # the server that forks would fail without a word
        raise ModuleNotFoundError("No module named 'torch'", name="torch")
    context, steps = mp.get_context("forkserver"), count(1)
    context.set_forkserver_preload([__name__, *_NEEDED])
    with (
        progress(f"{num_ranks} ranks at work") as tell,
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(num_ranks, context, _end_with_parent) as processes,
    ):

        def results(tasks: Sequence[Future[Any]]) -> list[Any]:
            try:
                for task in as_completed(tasks):
                    task.result()  # raises here what the rank has raised
                    if tell is not None:
                        tell(next(steps), num_ranks * (1 + num_cases))
            except Exception as error:
                for process in processes._processes.values():
                    process.kill()  # they would wait for the one that failed
                cause = error.__cause__ or error
                raise MeshAttentionError(f"a rank on this computer failed:\n{cause}") from error
            return [task.result() for task in tasks]

        def check(name: str, mask: Mask, options: dict[str, Any], **sizes: int) -> CheckedCase:
            tasks = [processes.submit(_run_case, mask, options, sizes) for _ in range(num_ranks)]
            counted, planned, errors = zip(*results(tasks), strict=True)
            if tell is None:
                print(f"checked: {name}", file=sys.stderr, flush=True)
            (of_first_rank,) = filter(None, errors)
            return CheckedCase(sum(counted), planned[0], *of_first_rank)

        results([processes.submit(_join, r, num_ranks, folder) for r in range(num_ranks)])
        yield check


def _end_with_parent() -> None:
    """A rank whose parent was killed would wait for its next task for ever."""

    def watch() -> None:
        parent = mp.parent_process()
        assert parent is not None
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, name="mesh_attention parent", daemon=True).start()


def _join(rank: int, num_ranks: int, folder: str) -> None:
    """Makes this process a rank."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", num_ranks)  # type: ignore[attr-defined]
    sizes: Any = {"rank": rank, "world_size": num_ranks}
    dist.init_process_group("gloo", store=store, timeout=_TIMEOUT, **sizes)


def _run_case(
    mask: Mask, options: dict[str, Any], sizes: dict[str, int]
) -> tuple[float, float, tuple[float, ...]]:
    """`run_method` on this rank, as numbers: the process of the command cannot read its classes."""
    from mesh_attention.measure.exactness import run_method

    ran = run_method(mask, options, **sizes)
    return ran.counted_units, ran.planned_units, tuple(ran.errors or ())
