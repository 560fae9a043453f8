"""From what a caller writes to what the planner takes: masks, tiles and options by name.

No torch here, so the command line and the library read arguments in the same way.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mesh_attention.errors import PlanError
from mesh_attention.plan.arguments import flag, number, pair
from mesh_attention.plan.mask import Mask
from mesh_attention.plan.methods.table import METHODS, make_plan
from mesh_attention.plan.plan import Plan
from mesh_attention.plan.problem import Problem

__all__ = ["attention_mask", "build_plan"]


def attention_mask(
    *, causal: bool, mask: Mask | None = None, window_size: tuple[int, int] | None = None
) -> Mask:
    """One mask from the ways to say it; contradictions are refused."""
    flag("causal", causal)
    window = _window(window_size)
    if mask is not None and not isinstance(mask, Mask):
        raise PlanError(f"mask={mask!r}: must be a Mask, such as Mask(causal=True)")
    if mask is None:
        return Mask(causal=causal, window=window)
    if window is not None:
        raise PlanError("give the window either as window_size or inside mask, not both")
    if causal and not mask.causal:
        raise PlanError("causal=True contradicts a mask that is not causal; say it in the mask")
    return mask


def _window(size: Any) -> tuple[int | None, int | None] | None:
    """flash-attn's window: -1 is no limit."""
    if size is None:
        return None
    try:
        left, right = (number("window_size", side, least=-1) for side in size)
    except (TypeError, ValueError) as error:
        if isinstance(error, PlanError):
            raise
        raise PlanError(f"window_size={size!r}: give (left, right), -1 for no limit") from None
    if (left, right) == (-1, -1):
        return None
    return (None if left == -1 else left, None if right == -1 else right)


def build_plan(problem: Problem, num_ranks: int, method: str, given: Mapping[str, Any]) -> Plan:
    """The plan for options as people write them; None means: choose for me."""
    options = {name: value for name, value in given.items() if value is not None}
    if "tile" in options:
        options["tile"] = pair("tile", options["tile"])
    names = METHODS[method].options() if method in METHODS else ()
    if "auto_cut" in names and not {"chunks", "heads_at_once"} & options.keys():
        options.setdefault("auto_cut", True)
    return make_plan(problem, num_ranks, method=method, **options)
