"""One word, one thing: a reader who meets a class name anywhere knows which class it is."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import mesh_attention

ROOT = Path(mesh_attention.__path__[0])


def named_twice(root: Path) -> dict[str, list[str]]:
    """Classes of one name and the files that define them."""
    results = defaultdict(list)
    for file in sorted(root.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                results[node.name].append(file.relative_to(root).as_posix())
    return {name: files for name, files in results.items() if len(files) > 1}


def test_no_class_name_occurs_twice() -> None:
    assert named_twice(ROOT) == {}


def test_a_class_name_that_occurs_twice_is_found(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("class Block: ...\nclass Row: ...\n")
    (tmp_path / "two.py").write_text("class Outer:\n    class Block: ...\n")
    assert named_twice(tmp_path) == {"Block": ["one.py", "two.py"]}
