"""Every public name is marked as stable or as experimental, and its docstring agrees."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

import mesh_attention
from mesh_attention import ContextParallel
from mesh_attention.stability import EXPERIMENTAL, STABLE

MODULES = ("testing", "cost", "kernels", "huggingface")
PUBLIC = {
    *(f"mesh_attention.{name}" for name in (*mesh_attention.__all__, *MODULES)),
    *(f"mesh_attention.ContextParallel.{x}" for x in dir(ContextParallel) if x[0] != "_"),
}


def test_every_public_name_is_marked_once_in_stability_py() -> None:
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
