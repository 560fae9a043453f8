"""Imports point down: each layer knows those below it and none above it.

What is below can then be read, tested and used without what is above; most of all, planning and
simulating need no torch.
"""

from __future__ import annotations

import ast
import doctest
import importlib
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import mesh_attention.choose
import mesh_attention.cost
import mesh_attention.plan

# From the top down. Names of one row may import each other; every name at the top of the package
# has its row, and a folder inside one may have another.
LAYERS = (
    ("__main__", "cli"),
    ("demo",),
    ("measure",),
    ("huggingface",),
    ("__init__", "attention_module", "context_parallel", "functional", "testing"),
    ("context_batches", "context_training"),
    ("replaced_attention",),
    (
        *("batch_documents", "compiled_attention", "losses", "sharded_batch", "sharded_buffers"),
        "whole_batch",
    ),
    ("context_arguments", "context_report", "context_sizes"),
    ("context_auto",),
    ("runtime",),
    ("tensor_faults",),
    ("kernels",),
    ("report",),
    ("choose",),
    ("cost",),
    ("plan",),
    ("cost.machine",),
    ("files", "plots"),
    ("errors", "version"),
)
WITHOUT_TORCH = ("report", "choose", "cost", "plan", "files", "plots", "errors", "version")
ROOT = Path(mesh_attention.__path__[0])
MODULES = sorted(
    info.name
    for layer in (mesh_attention.plan, mesh_attention.cost, mesh_attention.choose)
    for info in pkgutil.walk_packages(layer.__path__, f"{layer.__name__}.")
)


def imports(file: Path, root: Path) -> Iterator[str]:
    """Every module that a file imports anywhere in it, in functions and for types too."""
    folder = (root.name, *file.relative_to(root).parent.parts)
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = folder[: len(folder) - node.level + 1] if node.level else ()
            module = ".".join((*above, *filter(None, [node.module])))
            # A name of the package itself may be a module of it, or a name of its __init__.
            yield from (f"{module}.{alias.name}" for alias in node.names)


def top(file: Path, root: Path) -> str:
    first = file.relative_to(root).parts[0]
    return first.removesuffix(".py")


def layer(file: Path, root: Path, height: dict[str, int]) -> str:
    """Its folder inside a folder, where that has a row of its own."""
    inner = ".".join(file.relative_to(root).parts[:2])
    return inner if inner in height else top(file, root)


def layer_imported(module: str, root: Path, height: dict[str, int]) -> str | None:
    package, _, path = module.partition(".")
    if package != root.name:
        return None
    inner = ".".join(path.split(".")[:2])
    if inner in height:
        return inner
    name = path.partition(".")[0]
    here = root / name
    return name if name and (here.is_dir() or here.with_suffix(".py").exists()) else "__init__"


def upward(root: Path, layers: tuple[tuple[str, ...], ...]) -> list[str]:
    """What is wrong with the imports of the package at `root`, a line each."""
    height = {name: -row for row, names in enumerate(layers) for name in names}
    wrong = []
    for file in sorted(root.rglob("*.py")):
        name, where = layer(file, root, height), file.relative_to(root).as_posix()
        if name not in height:
            wrong.append(f"{where} is in no layer")
            continue
        for module in imports(file, root):
            other = layer_imported(module, root, height)
            if other is not None and height.get(other, 0) > height[name]:
                wrong.append(f"{where} imports {module}, which is above it")
    return wrong


def test_imports_point_down_only() -> None:
    assert upward(ROOT, LAYERS) == []
    there = {top(file, ROOT) for file in ROOT.rglob("*.py")}
    assert there == {name for names in LAYERS for name in names if "." not in name}


@pytest.mark.parametrize(
    ("statement", "module"),
    [
        ("from house.cli.main import run", "house.cli.main.run"),
        ("import house.cli.main", "house.cli.main"),
        ("from house import cli", "house.cli"),
        ("from ..cli import main", "house.cli.main"),
        ("def f():\n    from house.cli import main", "house.cli.main"),
    ],
)
def test_a_lower_file_that_imports_a_higher_one_is_found(
    statement: str, module: str, tmp_path: Path
) -> None:
    root, layers = tmp_path / "house", (("cli",), ("plan",), ("errors",))
    for file, text in {
        "cli/main.py": "from house.plan.mask import Mask\nimport torch",
        "plan/mask.py": "from house.errors import Error\nfrom .runs import Run",
        "plan/runs.py": "",
        "errors.py": "",
    }.items():
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_text(text)
    assert upward(root, layers) == []
    (root / "plan/mask.py").write_text(statement)
    assert upward(root, layers) == [f"plan/mask.py imports {module}, which is above it"]


def test_a_file_that_has_no_layer_is_found(tmp_path: Path) -> None:
    root = tmp_path / "house"
    root.mkdir()
    (root / "attic.py").touch()
    assert upward(root, (("plan",),)) == ["attic.py is in no layer"]


def test_layers_without_torch_name_it_nowhere() -> None:
    for file in ROOT.rglob("*.py"):
        if top(file, ROOT) in WITHOUT_TORCH:
            packages = {module.partition(".")[0] for module in imports(file, ROOT)}
            assert "torch" not in packages, file


def test_importing_every_module_of_planning_and_clusters_imports_neither_torch_nor_matplotlib() -> (
    None
):
    assert len(MODULES) > 30
    script = (
        "import importlib, sys\n"
        f"for name in {['mesh_attention', *MODULES]!r}: importlib.import_module(name)\n"
        "print([m for m in sys.modules if m.partition('.')[0] in ('torch', 'matplotlib')])\n"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_in_the_docstrings_are_true(name: str) -> None:
    failed, _ = doctest.testmod(importlib.import_module(name))
    assert failed == 0
