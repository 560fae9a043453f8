"""Ranks on this computer: processes joined by gloo that hold methods against float64 attention."""

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
from itertools import count
from typing import TYPE_CHECKING, Any

from mesh_attention.cli.output import progress
from mesh_attention.errors import MeshAttentionError
from mesh_attention.plan.problem.mask import Mask

if TYPE_CHECKING:
    from mesh_attention.measure.exactness import MethodRun

_TIMEOUT = timedelta(seconds=100)
# Gradients import the last of these, for half a second on each rank.
_NEEDED = ("mesh_attention.measure.exactness", "torch.fx.experimental.symbolic_shapes")


@contextmanager
def local_ranks(num_ranks: int, num_cases: int) -> Iterator[Callable[..., MethodRun]]:
    """Yields `check(name, mask, options, **sizes)`. As ranks communicate in a case, none of its
    tasks ends before all have begun, and each process takes one of them. `num_cases` cases fill the
    bar; without a bar, standard error says what was checked."""
    from mesh_attention.measure.exactness import run_method  # imports torch

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

        def check(name: str, mask: Mask, options: dict[str, Any], **sizes: int) -> MethodRun:
            tasks = [processes.submit(run_method, mask, options, **sizes) for _ in range(num_ranks)]
            run: MethodRun = results(tasks)[0]
            if tell is None:
                print(f"checked: {name}", file=sys.stderr, flush=True)
            return run

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
