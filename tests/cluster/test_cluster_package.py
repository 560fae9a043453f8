"""The cluster layer imports no torch, and the examples in its docstrings are true."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import subprocess
import sys

import pytest

import mesh_attention.cluster

MODULES = sorted(
    info.name
    for info in pkgutil.walk_packages(mesh_attention.cluster.__path__, "mesh_attention.cluster.")
)


def test_importing_every_module_of_the_cluster_layer_imports_neither_torch_nor_matplotlib() -> None:
    assert len(MODULES) > 10
    script = (
        "import importlib, sys\n"
        f"for name in {MODULES!r}: importlib.import_module(name)\n"
        "print([m for m in sys.modules if m.partition('.')[0] in ('torch', 'matplotlib')])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_in_the_docstrings_are_true(name: str) -> None:
    failed, _ = doctest.testmod(importlib.import_module(name))
    assert failed == 0
