"""Liger's kernels on the CPU, as Triton interprets them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from unittest.mock import patch

from support.interpreted_triton import mend_bounds_of_loops

mend_bounds_of_loops()


@contextmanager
def interpreted_liger() -> Iterator[None]:
    """For what imports them inside; modules are as they were, after."""

    def loaded() -> dict[str, ModuleType]:
        return {name: x for name, x in sys.modules.items() if name.startswith("liger_kernel")}

    before = loaded()
    for name in before:
        del sys.modules[name]
    try:
        with patch.dict(os.environ, {"TRITON_INTERPRET": "1"}):
            yield
    finally:
        for name in loaded():
            del sys.modules[name]
        sys.modules.update(before)
