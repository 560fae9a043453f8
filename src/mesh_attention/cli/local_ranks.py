"""Ranks on this computer: processes joined by gloo, for commands that run real attention.

    with LocalRanks(4) as ranks:
        results = ranks.run(function, "argument")  # one result of each rank, in no order

The module of `function` must import no torch at its top: only the ranks need it.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from datetime import timedelta
from importlib.util import find_spec
from types import TracebackType
from typing import Any, Self, TypeVar

from mesh_attention.errors import MeshAttentionError

_TIMEOUT = timedelta(seconds=100)
# Gradients import the last of these, for half a second on each rank.
_NEEDED = ("mesh_attention.api.context_parallel", "torch.fx.experimental.symbolic_shapes")
_Result = TypeVar("_Result")


class LocalRanks:
    """`tell` is called whenever a rank has done a task."""

    def __init__(self, num_ranks: int, tell: Callable[[], None] = lambda: None) -> None:
        if find_spec("torch") is None:  # the server that forks would fail without a word
            raise ModuleNotFoundError("No module named 'torch'", name="torch")
        context = mp.get_context("forkserver")
        context.set_forkserver_preload([__name__, *_NEEDED])
        self.num_ranks, self._tell = num_ranks, tell
        self._folder = tempfile.TemporaryDirectory()
        self._processes = ProcessPoolExecutor(num_ranks, context, _end_with_parent)

    def __enter__(self) -> Self:
        submit = self._processes.submit
        self._results(
            [submit(_join, r, self.num_ranks, self._folder.name) for r in range(self.num_ranks)]
        )
        return self

    def run(self, function: Callable[..., _Result], *args: Any) -> list[_Result]:
        """Calls `function` on every rank. It must communicate: then none of the tasks ends before
        all have begun, and each process takes one of them."""
        return self._results(
            [self._processes.submit(function, *args) for _ in range(self.num_ranks)]
        )

    def _results(self, tasks: Sequence[Future[_Result]]) -> list[_Result]:
        try:
            for task in as_completed(tasks):
                task.result()  # raises here what the rank has raised
                self._tell()
        except Exception as error:
            for process in self._processes._processes.values():
                process.kill()  # they would wait for the one that failed
            cause = error.__cause__ or error
            raise MeshAttentionError(f"a rank on this computer failed:\n{cause}") from error
        return [task.result() for task in tasks]

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._processes.shutdown(cancel_futures=True)
        self._folder.cleanup()


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
