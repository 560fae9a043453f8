"""What is read from a cluster's file is frozen: a simulation cannot change it for the next one."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil

from mesh_attention import choose, cost, machine


def test_every_dataclass_of_clusters_is_frozen() -> None:
    frozen_by_name = {
        name: member.__dataclass_params__.frozen  # type: ignore[attr-defined]
        for package in (machine, cost, choose)
        for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
        for name, member in inspect.getmembers(importlib.import_module(info.name), inspect.isclass)
        if member.__module__ == info.name and dataclasses.is_dataclass(member)
    }
    # The state of a simulation, and what fills up.
    filled = ["Activity", "Capacity", "RankTimes", "Tuning"]
    assert [name for name, frozen in frozen_by_name.items() if not frozen] == filled
    assert len(frozen_by_name) > 20
