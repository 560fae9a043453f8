"""Liger's kernels on the CPU, as Triton interprets them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any
from unittest.mock import patch

from triton.runtime import interpreter

_patch_tensor = interpreter._patch_lang_tensor


def _patch_tensor_and_index(tensor: Any, scope: Any) -> None:
    """Bounds of loops are arrays of one element: Triton 3.6 calls `int` on them, which numpy 2.4
    refuses."""
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


@contextmanager
def interpreted_liger() -> Iterator[None]:
    """For what imports them inside; modules are as they were, after."""

    def loaded() -> dict[str, ModuleType]:
        return {name: x for name, x in sys.modules.items() if name.startswith("liger_kernel")}

    before = loaded()
    for name in before:
        del sys.modules[name]
    try:
        with (
            patch.dict(os.environ, {"TRITON_INTERPRET": "1"}),
            patch.object(interpreter, "_patch_lang_tensor", _patch_tensor_and_index),
        ):
            yield
    finally:
        for name in loaded():
            del sys.modules[name]
        sys.modules.update(before)
