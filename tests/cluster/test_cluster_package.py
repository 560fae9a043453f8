"""The cluster layer imports no torch, and the examples in its docstrings are true."""

from __future__ import annotations

import doctest
import importlib

import pytest

import mesh_attention.cluster
from support.layer import imported_with, modules_of

MODULES = modules_of(mesh_attention.cluster)


def test_importing_every_module_of_the_cluster_layer_imports_neither_torch_nor_matplotlib() -> None:
    assert len(MODULES) > 10
    assert imported_with(MODULES, ("torch", "matplotlib")) == "[]"


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_in_the_docstrings_are_true(name: str) -> None:
    failed, _ = doctest.testmod(importlib.import_module(name))
    assert failed == 0
