"""Exact attention over sequences too long for one GPU.

The names below are loaded when they are first used: `import mesh_attention` imports no torch, and
planning never does.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from mesh_attention.errors import MissingPackageError
from mesh_attention.version import __version__

if TYPE_CHECKING:
    from mesh_attention.api.context_parallel import ContextParallel, ContextParallelAttention
    from mesh_attention.api.functional import mesh_attention, release
    from mesh_attention.choose.ask import make_plan
    from mesh_attention.diagnose.doctor import doctor
    from mesh_attention.errors import MeshAttentionError
    from mesh_attention.kernels import register as register_kernel
    from mesh_attention.kernels import unregister as unregister_kernel
    from mesh_attention.plan.language.plan import Plan
    from mesh_attention.plan.problem.mask import Mask
    from mesh_attention.plan.problem.problem import Problem
    from mesh_attention.plan.read.count import count
    from mesh_attention.plan.read.verify import verify
    from mesh_attention.step.splits import plan_step

_HOMES = {
    "ContextParallel": ("mesh_attention.api.context_parallel", "ContextParallel"),
    "ContextParallelAttention": ("mesh_attention.api.context_parallel", "ContextParallelAttention"),
    "Mask": ("mesh_attention.plan.problem.mask", "Mask"),
    "MeshAttentionError": ("mesh_attention.errors", "MeshAttentionError"),
    "Plan": ("mesh_attention.plan.language.plan", "Plan"),
    "Problem": ("mesh_attention.plan.problem.problem", "Problem"),
    "count": ("mesh_attention.plan.read.count", "count"),
    "doctor": ("mesh_attention.diagnose.doctor", "doctor"),
    "make_plan": ("mesh_attention.choose.ask", "make_plan"),
    "mesh_attention": ("mesh_attention.api.functional", "mesh_attention"),
    "plan_step": ("mesh_attention.step.splits", "plan_step"),
    "register_kernel": ("mesh_attention.kernels", "register"),
    "release": ("mesh_attention.api.functional", "release"),
    "unregister_kernel": ("mesh_attention.kernels", "unregister"),
    "verify": ("mesh_attention.plan.read.verify", "verify"),
}

__all__ = [
    "ContextParallel", "ContextParallelAttention", "Mask", "MeshAttentionError", "Plan", "Problem",
    "__version__", "count", "doctor", "make_plan", "mesh_attention", "plan_step", "register_kernel",
    "release", "unregister_kernel", "verify",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _HOMES[name]
    try:
        return getattr(import_module(module), attribute)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise MissingPackageError(
            f"{name} needs torch, which is not installed: pip install torch (plans are made, "
            "proven, counted and simulated without it)"
        ) from error


def __dir__() -> list[str]:
    return sorted(__all__)
