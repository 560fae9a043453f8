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
from functools import cache
from pathlib import Path

import pytest

import mesh_attention.choose
import mesh_attention.cost
import mesh_attention.machine
import mesh_attention.plan
import mesh_attention.step

# From the top down. A row is a file or a folder with all in it, unless a folder inside has a row of
# its own. Names of one row may not import each other.
LAYERS = (
    ("__main__",),
    ("cli",),
    ("measure",),
    ("huggingface",),
    ("__init__", "testing"),
    ("diagnose",),
    ("api",),
    ("train",),
    ("request",),
    ("runtime.session",),
    ("runtime.agreement", "runtime.execute"),
    ("runtime.transport",),
    ("runtime.device", "runtime.__init__"),
    ("kernels.__init__",),
    ("kernels",),
    ("kernels.fused",),
    ("kernels.rows",),
    ("report",),
    ("step",),
    ("choose",),
    ("cost",),
    ("plan.read.verify",),
    ("plan.read",),
    ("plan.passes",),
    ("plan.methods",),
    ("plan.methods.parts",),
    ("plan.language",),
    ("plan.problem", "plan.__init__"),
    ("machine",),
    ("files",),
    ("errors", "version"),
)
WITHOUT_TORCH = (
    "report",
    "step",
    "choose",
    "cost",
    "plan",
    "machine",
    "files",
    "errors",
    "version",
)
ROOT = Path(mesh_attention.__path__[0])
MODULES = sorted(
    info.name
    for package in (
        mesh_attention.machine,
        mesh_attention.plan,
        mesh_attention.cost,
        mesh_attention.choose,
        mesh_attention.step,
    )
    for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
)


def imports(file: Path, root: Path) -> tuple[str, ...]:
    """Every module that a file imports anywhere in it, in functions and for types too."""
    return imports_of(file.read_text(), (root.name, *file.relative_to(root).parent.parts))


@cache  # three tests read all files
def imports_of(text: str, folder: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(named(text, folder))


def named(text: str, folder: tuple[str, ...]) -> Iterator[str]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = folder[: len(folder) - node.level + 1] if node.level else ()
            module = ".".join((*above, *filter(None, [node.module])))
            # A name of the package itself may be a module of it, or a name of its __init__.
            yield from (f"{module}.{alias.name}" for alias in node.names)


def file_of(module: str, root: Path) -> Path | None:
    """The file of the package in which a module, or a name in a module, stands."""
    package, *parts = module.split(".")
    if package != root.name:
        return None
    for end in (len(parts), len(parts) - 1):
        path = root.joinpath(*parts[: max(end, 0)])
        if path.with_suffix(".py").exists():
            return path.with_suffix(".py")
        if path.is_dir():
            return path / "__init__.py"
    return root / "__init__.py"


def layer(file: Path, root: Path, height: dict[str, int]) -> str | None:
    """The row of a file: its own, or that of the innermost folder which has one."""
    parts = file.relative_to(root).with_suffix("").parts
    names = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
    return next((name for name in names if name in height), None)


def upward(root: Path, layers: tuple[tuple[str, ...], ...]) -> list[str]:
    """What is wrong with the imports of the package at `root`, a line each."""
    height = {name: -row for row, names in enumerate(layers) for name in names}
    wrong = []
    for file in sorted(root.rglob("*.py")):
        name, where = layer(file, root, height), file.relative_to(root).as_posix()
        if name is None:
            wrong.append(f"{where} is in no layer")
            continue
        for module in imports(file, root):
            imported = file_of(module, root)
            other = imported and layer(imported, root, height)
            if other and other != name and height[other] >= height[name]:
                wrong.append(f"{where} imports {module}, which is not below it")
    return wrong


def cycles(root: Path) -> list[list[str]]:
    """Files that import each other, directly or through others."""
    below = {file: {file_of(m, root) for m in imports(file, root)} for file in root.rglob("*.py")}

    def reached(start: Path) -> set[Path]:
        files: set[Path] = set()
        waiting = [start]
        while waiting:
            for file in below.get(waiting.pop(), ()):
                if file is not None and file not in files:
                    files.add(file)
                    waiting.append(file)
        return files

    reach = {file: reached(file) for file in below}
    rings = {
        tuple(sorted(str(other.relative_to(root)) for other in reach[file] if file in reach[other]))
        for file in below
        if file in reach[file]
    }
    return sorted(map(list, rings))


def test_imports_point_down_only() -> None:
    assert upward(ROOT, LAYERS) == []
    height = {name: 0 for names in LAYERS for name in names}
    rooms = {layer(file, ROOT, height) for file in ROOT.rglob("*.py")}
    assert rooms == set(height), "a row of LAYERS that has no file"


def test_no_files_import_each_other() -> None:
    assert cycles(ROOT) == []


def test_files_that_import_each_other_are_found(tmp_path: Path) -> None:
    root = tmp_path / "house"
    root.mkdir()
    for name, text in {"a": "import house.b", "b": "from house import c", "c": "", "d": ""}.items():
        (root / f"{name}.py").write_text(text)
    assert cycles(root) == []
    (root / "c.py").write_text("def f():\n    from house.a import x")
    assert cycles(root) == [["a.py", "b.py", "c.py"]]


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
    assert upward(root, layers) == [f"plan/mask.py imports {module}, which is not below it"]


def test_a_file_that_has_no_layer_is_found(tmp_path: Path) -> None:
    root = tmp_path / "house"
    root.mkdir()
    (root / "attic.py").touch()
    assert upward(root, (("plan",),)) == ["attic.py is in no layer"]


def test_layers_without_torch_name_it_nowhere() -> None:
    for file in ROOT.rglob("*.py"):
        if file.relative_to(ROOT).parts[0].removesuffix(".py") in WITHOUT_TORCH:
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
