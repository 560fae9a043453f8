"""Which methods have an option, and what to say of one that none has."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from mesh_attention.errors import PlanError
from mesh_attention.plan.methods.table import METHODS

# As of 0.1, and what to write now.
RENAMED_OPTIONS = {
    "heads_at_once": "it is 'head_slices' now",
    "backward_heads_at_once": "it is 'backward_head_slices' now",
    "max_buffer_bytes": "it is 'max_memory_bytes' now",
    "auto_cut": "leave it out: plans are cut by default",
}


# No options of plans, and who takes them.
_TAKEN_ELSEWHERE = {
    "cluster": "plan_on(cluster, problem, ranks, ...) of mesh_attention.cost.planning plans for "
    "one, find_best of mesh_attention.choose.auto searches on it, and ContextParallel("
    "cluster=...) chooses by it",
}


def renamed(option: str) -> str:
    """What to say of it in brackets; nothing where it never was one."""
    known = RENAMED_OPTIONS | _TAKEN_ELSEWHERE
    return f" ({known[option]})" if option in known else ""


def methods_with(options: Mapping[str, Any]) -> tuple[str, ...]:
    """Those that have all of these options."""
    given = {name for name, value in options.items() if value is not None}
    fits = tuple(name for name, method in METHODS.items() if given <= method.options().keys())
    if not fits:
        known = {option for method in METHODS.values() for option in method.options()}
        for name in sorted(given - known):
            near = get_close_matches(name, known, n=1)
            meant = f"; did you mean {near[0]!r}?" if near and not renamed(name) else ""
            raise PlanError(f"no method has an option {name!r}{renamed(name)}{meant}")
        raise PlanError(
            f"no method has all of the options {', '.join(sorted(given))}; leave one out, or name "
            "a method"
        )
    return fits
