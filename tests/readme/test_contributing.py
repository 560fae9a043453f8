"""CONTRIBUTING.md and docs/add-a-method.md name files and classes that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import mesh_attention
from mesh_attention.plan.methods.table import METHODS

ROOT = Path(__file__).resolve().parents[2]
SOURCE = Path(mesh_attention.__file__).parent
PAGE = (ROOT / "CONTRIBUTING.md").read_text()
ADD_A_METHOD = (ROOT / "docs" / "add-a-method.md").read_text()
QUOTED = set(re.findall(r"`([^`]+)`", PAGE + ADD_A_METHOD))


def test_every_path_of_the_page_exists() -> None:
    paths = [word for word in QUOTED if re.fullmatch(r"[\w./-]+(/|\.py|\.md)", word)]
    assert len(paths) > 40
    folders = (
        ROOT,
        SOURCE,
        *(SOURCE / room for room in ("request", "runtime", "runtime/session", "runtime/agreement")),
        SOURCE / "runtime/execute",
        SOURCE / "kernels",
        SOURCE / "plan" / "methods",
        ROOT / "tests/methods",
    )
    missing = [path for path in paths if not any((folder / path).exists() for folder in folders)]
    assert missing == []


def test_every_class_and_function_of_the_page_exists() -> None:
    known = set[str]()
    for folder in (SOURCE, ROOT / "tests/methods"):
        for file in folder.rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.ClassDef | ast.FunctionDef) and folder is SOURCE:
                    known.add(node.name)
                elif isinstance(node, ast.Assign | ast.AnnAssign):
                    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                    names = {x.id for x in targets if isinstance(x, ast.Name)}
                    known |= {name for name in names if name.isupper()}
    known |= set(mesh_attention.__all__)
    words = {word.partition("(")[0] for word in QUOTED if re.match(r"[A-Z][\w.]+(\(|$)", word)}
    named = {part for word in words for part in word.split(".") if not word.endswith(".md")}
    named |= {
        word for word in QUOTED if re.fullmatch(r"plan_\w+|_\w+|double_ring|\w+_kernel", word)
    }
    assert len(named) > 12
    assert named - known == set()


def test_every_kind_of_new_thing_says_what_to_touch() -> None:
    table = PAGE[PAGE.index("| for a new |") :].split("\n\n")[0]
    rows = [line.split("|")[1].strip() for line in table.splitlines()[2:]]
    assert {"method", "option", "mask", "kernel", "transport"} <= set(rows)


def test_methods_and_only_methods_are_builders_of_the_table() -> None:
    """One idea a file: what the table says of a method's builder is in `plan/methods/`."""
    for method in METHODS.values():
        assert method.build.__module__.startswith("mesh_attention.plan.methods.")
