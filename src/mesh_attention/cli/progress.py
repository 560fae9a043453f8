"""A progress bar on standard error, for work that lasts longer than a moment.

Only a person at a terminal sees it: with rich when it is installed, as a percentage otherwise.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec

__all__ = ["progress"]

Progress = Callable[[int, int], None]
_PATIENCE_SECONDS = 1.0
_REDRAW_SECONDS = 0.1


@contextmanager
def progress(what: str) -> Iterator[Progress | None]:
    """A function to be told (done, all); None where nobody looks."""
    if not sys.stderr.isatty():
        yield None
    elif find_spec("rich"):
        with _rich_bar(what) as bar:
            yield bar
    else:
        yield from _percentage(what)


@contextmanager
def _rich_bar(what: str) -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import Progress as Bar

    begin = time.monotonic()
    with Bar(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None, visible=False)

        def tell(done: int, total: int) -> None:
            late = time.monotonic() - begin > _PATIENCE_SECONDS
            bar.update(task, completed=done, total=total, visible=late)

        yield tell


def _percentage(what: str) -> Iterator[Progress]:
    begin = last = time.monotonic()
    shown = False

    def tell(done: int, total: int) -> None:
        nonlocal last, shown
        now = time.monotonic()
        if now - begin > _PATIENCE_SECONDS and now - last > _REDRAW_SECONDS and total:
            last, shown = now, True
            print(f"\r{what} {done / total:4.0%}", end="", file=sys.stderr, flush=True)

    yield tell
    if shown:
        print("\r" + " " * (len(what) + 5) + "\r", end="", file=sys.stderr, flush=True)
