"""What subcommands print: one line of JSON, a table for people, notes, a progress bar.

Only a person at a terminal sees the bar: with rich where it is installed, else as a percentage.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from mesh_attention.choose.explain import time_text
from mesh_attention.cli.command import Args
from mesh_attention.cost.timeline import Timeline
from mesh_attention.machine.kernel_facts import library_facts

Progress = Callable[[int, int], None]  # called with (done, total)
BATCH_FLAG = "--batch N=1  sequences at a time (default 1)"
_PATIENCE_SECONDS = 1.0
_REDRAW_SECONDS = 0.1


def show(
    args: Args,
    to_json: Callable[[], Any],
    to_lines: Callable[[], Iterable[str]],
    *,
    ok: bool = True,
) -> int:
    """Prints the answer, as JSON with --json, else as lines; returns the exit code."""
    print(json.dumps(to_json()) if args.json else "\n".join(to_lines()))
    return 0 if ok else 1


def of_batch(value: Any, batch: int, key: str = "") -> Any:
    """The numbers of one sequence made those of a batch: all bytes are multiplied."""
    if isinstance(value, dict):
        return {name: of_batch(inner, batch, f"{key} {name}") for name, inner in value.items()}
    return value * batch if "bytes" in key and isinstance(value, int | float) else value


def batch_note(batch: int, seconds: float) -> list[str]:
    """A note on the time of a batch; `seconds` is the time of one sequence."""
    if batch == 1:
        return []
    return [
        f"{batch} sequences at a time need {batch} times the memory and traffic of one, and take "
        f"at most {batch} times as long: {time_text(batch * seconds)}."
    ]


def table(rows: Sequence[Sequence[str]]) -> str:
    """Aligns the first column to the left, the others to the right.

    >>> print(table([("", "forward"), ("received", "1 MiB")]))
              forward
    received    1 MiB
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *rest in rows:
        cells = [f"{cell:>{width}}" for cell, width in zip(rest, widths[1:], strict=True)]
        lines.append("  ".join([f"{first:<{widths[0]}}", *cells]).rstrip())
    return "\n".join(lines)


def ranks_text(ranks: int) -> str:
    return "1 rank" if ranks == 1 else f"{ranks} ranks"


def nodes_text(ranks: int, ranks_per_node: int) -> str:
    """
    >>> nodes_text(8, 8), nodes_text(9, 8)
    ('1 node of 8', '2 nodes of 8')
    """
    nodes = -(-ranks // ranks_per_node)
    return f"{nodes} node{'s' if nodes > 1 else ''} of {ranks_per_node}"


def missing_kernels(timelines: Iterable[Timeline]) -> list[str]:
    """The kernels of simulations that are not installed here; their rates are another machine's."""
    used = {name for timeline in timelines for name in timeline.kernels}
    return sorted(name for name in used if not _is_installed(name))


def _is_installed(kernel: str) -> bool:
    facts = library_facts().get(kernel)
    module = facts.module if facts is not None else None
    try:
        return find_spec(module or "torch") is not None
    except (ImportError, ValueError):
        return False


def missing_kernels_note(timelines: Iterable[Timeline]) -> list[str]:
    """One line, or none."""
    missing = ", ".join(missing_kernels(timelines))
    if not missing:
        return []
    return [
        f"Not installed here: {missing}; the times assume them. --kernel NAME chooses another "
        "kernel."
    ]


@contextmanager
def progress(what: str, *, shown: bool = True) -> Iterator[Progress | None]:
    """Yields a function that draws (done, total) once the work takes longer than a moment, or None
    where standard error is no terminal or the bar is not to be `shown`."""
    if not shown or not sys.stderr.isatty():
        yield None
        return
    begin = time.monotonic()
    if find_spec("rich"):
        from rich.console import Console
        from rich.progress import Progress as Bar

        with Bar(console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(what, total=None, visible=False)

            def tell(done: int, total: int) -> None:
                late = time.monotonic() - begin > _PATIENCE_SECONDS
                bar.update(task, completed=done, total=total, visible=late)

            yield tell
        return
    last = begin

    def tell_percentage(done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - begin > _PATIENCE_SECONDS and now - last > _REDRAW_SECONDS and total:
            last = now
            print(f"\r{what} {done / total:4.0%}", end="", file=sys.stderr, flush=True)

    yield tell_percentage
    if last > begin:
        print("\r" + " " * (len(what) + 5) + "\r", end="", file=sys.stderr, flush=True)
