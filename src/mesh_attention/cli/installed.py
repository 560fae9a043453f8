"""Which kernels of a simulation are not installed here: their rates are then of another machine."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec

from mesh_attention.cost.timeline import Timeline
from mesh_attention.machine.kernel_facts import library_facts


def missing_kernels(timelines: Iterable[Timeline | None]) -> list[str]:
    used = {name for one in timelines if one is not None for name in one.kernels}
    return sorted(name for name in used if not _is_here(name))


def missing_kernels_note(timelines: Iterable[Timeline | None]) -> list[str]:
    """One line, or none."""
    missing = missing_kernels(timelines)
    if not missing:
        return []
    which = ", ".join(missing)
    return [
        f"Not installed here: {which}; the rates used are those of the cluster's file, and "
        f"--kernel NAME chooses another."
    ]


def _is_here(name: str) -> bool:
    facts = library_facts().get(name)
    needed = facts.module if facts is not None else None
    try:
        return find_spec(needed or "torch") is not None
    except (ImportError, ValueError):
        return False
