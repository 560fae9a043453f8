"""Ranks on this computer: processes joined by gloo, for commands that run real attention.

The module of a function that they run must import no torch at its top: only the ranks need it.
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
from typing import Any

from mesh_attention.cli.output import progress
from mesh_attention.errors import MeshAttentionError

_TIMEOUT = timedelta(seconds=100)
# Gradients import the last of these, for half a second on each rank.
_NEEDED = ("mesh_attention.api.context_parallel", "torch.fx.experimental.symbolic_shapes")


@contextmanager
def local_ranks(num_ranks: int, num_cases: int) -> Iterator[Callable[..., list[Any]]]:
    """Yields `run(name, function, *args)`, which calls `function` on every rank and returns what
    each returns, in no order. The function must communicate: then none of its calls ends before all
    have begun, and each process takes one of them. `num_cases` calls of `run` fill the bar; without
    a bar, standard error says what was checked."""
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

        def run(name: str, function: Callable[..., Any], *args: Any) -> list[Any]:
            answers = results([processes.submit(function, *args) for _ in range(num_ranks)])
            if tell is None:
                print(f"checked: {name}", file=sys.stderr, flush=True)
            return answers

        results([processes.submit(_join, r, num_ranks, folder) for r in range(num_ranks)])
        yield run


def _end_with_parent() -> None:
    """A rank whose parent was killed would wait for its next task for ever."""

    def watch() -> None:
        parent = mp.parent_process()
        assert parent is not None
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, name="mesh_attention parent", daemon=True).start()


def _join(rank: int, num_ranks: int, folder: str) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", num_ranks)  # type: ignore[attr-defined]
    sizes: Any = {"rank": rank, "world_size": num_ranks}
    dist.init_process_group("gloo", store=store, timeout=_TIMEOUT, **sizes)
