"""Mends Triton's interpreter, which runs kernels on CPUs: bounds of loops are arrays of one element
there, and Triton 3.6 calls `int` on them, which numpy 2.4 refuses."""

from __future__ import annotations

from typing import Any

from triton.runtime import interpreter


def mend_bounds_of_loops() -> None:
    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_and_index(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_tensor_and_index
