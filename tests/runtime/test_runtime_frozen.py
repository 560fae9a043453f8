"""What the runtime binds once for all calls is frozen."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil

import mesh_attention.runtime


def test_every_dataclass_of_the_runtime_is_frozen_but_what_counts_uses() -> None:
    open_ones = set()
    for info in pkgutil.walk_packages(mesh_attention.runtime.__path__, "mesh_attention.runtime."):
        for name, result in inspect.getmembers(importlib.import_module(info.name), inspect.isclass):
            if result.__module__ == info.name and dataclasses.is_dataclass(result):
                frozen = result.__dataclass_params__.frozen  # type: ignore[attr-defined]
                open_ones |= set() if frozen else {name}
    assert open_ones == {"AgreedKind", "WorkspaceBlock", "_Meeting"}
