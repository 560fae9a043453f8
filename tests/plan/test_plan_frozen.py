"""Plans are frozen data: what one reader holds, no other can change."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil

import mesh_attention.plan


def test_every_dataclass_of_planning_is_frozen_but_two_that_never_leave_their_file() -> None:
    open_ones = set()
    num_frozen = 0
    for info in pkgutil.walk_packages(mesh_attention.plan.__path__, "mesh_attention.plan."):
        for name, member in inspect.getmembers(importlib.import_module(info.name), inspect.isclass):
            if member.__module__ == info.name and dataclasses.is_dataclass(member):
                frozen = member.__dataclass_params__.frozen  # type: ignore[attr-defined]
                num_frozen += frozen
                open_ones |= set() if frozen else {name}
    assert open_ones == {"_History", "_Kind"}  # what is left or was used of one
    assert num_frozen > 40
