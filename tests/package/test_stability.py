"""Every public name is marked as stable or as experimental, and its docstring agrees;
`docs/versions.md` says what that means.

A stable name keeps its arguments and meaning until the next major version. An experimental one may
change in any minor version; its docstring says so. A module stands for all that it exports. What is
neither here nor inside of a name here is internal.
"""

from __future__ import annotations

import importlib
from typing import Any

import pytest

import mesh_attention
from mesh_attention import ContextParallel


def _names(place: str, words: str) -> frozenset[str]:
    return frozenset(f"{place}.{word}" for word in words.split())


_MODULE, _OBJECT = "mesh_attention", "mesh_attention.ContextParallel"
STABLE = _names(
    _MODULE,
    "ContextParallel ContextParallelAttention mesh_attention release Mask Problem Plan make_plan "
    "verify count MeshAttentionError __version__ testing",
) | _names(
    _OBJECT,
    "attention shard unshard positions padding rank check close shard_batch documents prefetch "
    "check_positions context_parallel cross_entropy linear_cross_entropy log_probs token_mean "
    "keep_attention tiled plan choice verify volume memory",
)
EXPERIMENTAL = _names(
    _MODULE, "doctor plan_step register_kernel unregister_kernel cost kernels huggingface"
) | _names(_OBJECT, "packer traffic kernels transports")

MODULES = ("testing", "cost", "kernels", "huggingface")
PUBLIC = {
    *(f"mesh_attention.{name}" for name in (*mesh_attention.__all__, *MODULES)),
    *(f"mesh_attention.ContextParallel.{x}" for x in dir(ContextParallel) if x[0] != "_"),
}


def test_every_public_name_is_marked_once_() -> None:
    assert sorted(PUBLIC - STABLE - EXPERIMENTAL) == []
    assert sorted((STABLE | EXPERIMENTAL) - PUBLIC) == []
    assert not STABLE & EXPERIMENTAL


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_a_docstring_says_experimental_if_and_only_if_the_name_is(name: str) -> None:
    _, first, *rest = name.split(".")
    is_module = first in MODULES
    subject: Any = importlib.import_module(name) if is_module else getattr(mesh_attention, first)
    for attribute in rest:
        subject = getattr(subject, attribute)
    assert ("Experimental" in (subject.__doc__ or "")) == (name in EXPERIMENTAL)
