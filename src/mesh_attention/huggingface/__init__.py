"""Hugging Face transformers 5 on sequences that are split over ranks.

    cp = ModelContextParallel(model, mesh["cp"])
    batch = cp.shard_batch(**whole)
    logits = model(**batch.model_inputs()).logits

`ContextParallelTrainer(..., cp_size=4)` is the `Trainer` that does this, and `ContextParallelMixin`
makes one of any of its subclasses; `AcceleratorContextParallel` is for loops with accelerate. The
names below are loaded when they are first used: transformers takes seconds to import, and is an
extra.
Experimental: it follows transformers, whose inner parts change.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from mesh_attention.errors import MissingPackageError

if TYPE_CHECKING:
    from mesh_attention.huggingface.accelerator import AcceleratorContextParallel
    from mesh_attention.huggingface.attention import register
    from mesh_attention.huggingface.model import ModelContextParallel
    from mesh_attention.huggingface.trainer import ContextParallelMixin, ContextParallelTrainer

_HOMES = {
    "AcceleratorContextParallel": "accelerator",
    "ContextParallelMixin": "trainer",
    "ContextParallelTrainer": "trainer",
    "ModelContextParallel": "model",
    "register": "attention",
}

__all__ = [
    "AcceleratorContextParallel",
    "ContextParallelMixin",
    "ContextParallelTrainer",
    "ModelContextParallel",
    "register",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "transformers", "accelerate"):
            raise
        raise MissingPackageError(
            f"{error.name} is not installed: pip install 'transformers>=5.3,<6' 'accelerate>=1.13'"
        ) from error


def __dir__() -> list[str]:
    return sorted(__all__)
