"""What a layer without torch promises, whichever it is."""

from __future__ import annotations

import pkgutil
import subprocess
import sys
from collections.abc import Iterable
from types import ModuleType


def modules_of(package: ModuleType) -> list[str]:
    found = pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    return sorted(info.name for info in found)


def imported_with(modules: Iterable[str], unwanted: tuple[str, ...]) -> str:
    """Which of the unwanted packages a fresh interpreter has after importing the modules."""
    script = (
        "import importlib, sys\n"
        f"for name in {list(modules)!r}: importlib.import_module(name)\n"
        f"print([m for m in sys.modules if m.partition('.')[0] in {unwanted!r}])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()
