"""The plan layer imports no torch, and the examples in its docstrings are true."""

from __future__ import annotations

import doctest
import importlib

import pytest

import mesh_attention.plan
from support.layer import imported_with, modules_of

MODULES = modules_of(mesh_attention.plan)


def test_importing_the_package_and_every_module_of_the_plan_layer_imports_no_torch() -> None:
    assert len(MODULES) > 20
    assert imported_with(["mesh_attention", *MODULES], ("torch",)) == "[]"


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_in_the_docstrings_are_true(name: str) -> None:
    failed, _ = doctest.testmod(importlib.import_module(name))
    assert failed == 0
