"""`mesh-attention selftest`: is attention exact on this computer? Under a minute, without a GPU.

Every method runs on four processes, forward and backward, and every kernel of this computer on one
block; all are held against float64 attention (`measure/exactness.py`). Exit code 1: one is wrong.
Ranks are processes joined by gloo (`local_ranks`); `demo.py` runs on them too.
"""

from __future__ import annotations

import math
import multiprocessing as mp
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from datetime import timedelta
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple

from mesh_attention.cli.command import Args, Command
from mesh_attention.cli.output import progress, show, table
from mesh_attention.cli.values import one_of
from mesh_attention.errors import MeshAttentionError
from mesh_attention.plan.methods.table import AUTO, METHODS
from mesh_attention.plan.problem.mask import Mask
from mesh_attention.version import __version__

if TYPE_CHECKING:
    from mesh_attention.measure.exactness import Errors, KernelCheck, MethodRun

_TIMEOUT = timedelta(seconds=100)
# Gradients import the last of these, for half a second on each rank.
_NEEDED = ("mesh_attention.measure.exactness", "torch.fx.experimental.symbolic_shapes")
NUM_RANKS = 4
TOLERANCE = 1e-10
# Every method under a causal mask; the other masks by what is chosen for them.
_MASKS = {
    "full": Mask(),
    "window": Mask(causal=True, window=(40, 0)),
    "documents": Mask(causal=True, documents=(0, 11, 90, 203)),
}


class MethodCheck(NamedTuple):
    method: str
    mask: str
    errors: Errors
    failure: str = ""  # what a rank raised

    @property
    def ok(self) -> bool:
        return self.errors.are_within(TOLERANCE)

    def to_json(self) -> dict[str, Any]:
        head = {"method": self.method, "mask": self.mask, "ok": self.ok}
        return head | self.errors.to_json() | ({"failure": self.failure} if self.failure else {})


def run(args: Args) -> int:
    begin = time.monotonic()
    methods = [args.method] if args.method else [*METHODS]
    cases = [(name, "causal", Mask(causal=True)) for name in methods]
    cases += [] if args.method else [(AUTO, name, mask) for name, mask in _MASKS.items()]
    checks = _check_methods(cases)
    kernels, device = _check_kernels()
    ok = len(checks) == len(cases) and all(check.ok for check in checks)
    ok = ok and all(check.ok for check in kernels)
    seconds = time.monotonic() - begin
    return show(
        args,
        lambda: {
            "ok": ok,
            "version": __version__,
            "seconds": seconds,
            "ranks": NUM_RANKS,
            "gpu": device,
            "methods": [check.to_json() for check in checks],
            "kernels": [check.to_json() for check in kernels],
        },
        lambda: [
            *_methods_lines(checks),
            *_kernels_lines(kernels, device),
            f"{'ok' if ok else 'WRONG'}: mesh-attention {__version__}, "
            f"{len(checks) + len(kernels)} checks in {seconds:.0f} s",
        ],
        ok=ok,
    )


def _check_methods(cases: list[tuple[str, str, Mask]]) -> list[MethodCheck]:
    """Runs the cases up to the first that raises: its ranks are gone, and the others do not run."""
    from mesh_attention.measure.exactness import Errors  # imports torch

    checks: list[MethodCheck] = []
    with local_ranks(NUM_RANKS, len(cases)) as check:
        for name, mask_name, mask in cases:
            try:
                errors = check(f"{name}, {mask_name}", mask, {"method": name}).errors
                checks.append(MethodCheck(name, mask_name, errors))
            except MeshAttentionError as error:
                lines = str(error).strip().splitlines()
                checks.append(MethodCheck(name, mask_name, Errors(math.nan, math.nan), lines[-1]))
                break
    return checks


def _check_kernels() -> tuple[list[KernelCheck], str | None]:
    """Checks all kernels of the CPU and of the first GPU, and returns the name of that GPU too."""
    import torch

    from mesh_attention.measure.exactness import kernel_checks

    checks = kernel_checks("cpu")
    if not torch.cuda.is_available():
        return checks, None
    return [*checks, *kernel_checks("cuda")], torch.cuda.get_device_name(0)


def _methods_lines(checks: list[MethodCheck]) -> list[str]:
    rows = [["method", "mask", "error", "of gradients", ""]]
    for check in checks:
        word = "ok" if check.ok else f"WRONG {check.failure}"
        rows.append([check.method, check.mask, *check.errors.texts, word])
    return [f"{NUM_RANKS} processes, float64, forward and backward", table(rows), ""]


def _kernels_lines(checks: list[KernelCheck], device: str | None) -> list[str]:
    rows = [("kernel", "on", "error", "of gradients", "")]
    for check in checks:
        if check.errors is not None:
            word = "ok" if check.ok else f"WRONG in {check.note}"
            rows.append((check.kernel, check.device, *check.errors.texts, word))
    lines = [f"kernels on {'the CPU' if device is None else f'the CPU and {device}'}", table(rows)]
    for check in checks:
        if check.install is not None:
            lines.append(f"not installed: {check.kernel}; pip install {check.install}")
        elif check.errors is None:
            lines.append(f"not used here: {check.kernel} on {check.device}: {check.note}")
    if device is None:
        lines.append("No GPU was found, so the kernels of GPUs were not checked.")
    return [*lines, ""]


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


COMMAND = Command(
    run,
    """\
is attention exact here? every method on four processes, every kernel; under a minute

examples:
  mesh-attention selftest
  mesh-attention selftest --method mesh --json

--method NAME  this method only (default: all)
""",
    read={"method": one_of("method", METHODS)},
)
