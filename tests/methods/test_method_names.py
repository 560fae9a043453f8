"""Only builders and their table know methods by name; everything else reads programs.

A question is about a method, and stands beside the builders.
"""

from __future__ import annotations

import ast
from pathlib import Path

import mesh_attention
from mesh_attention.plan.methods.table import METHODS

SOURCE = Path(mesh_attention.__file__).parent
BUILDERS = SOURCE / "plan" / "methods"
OUTSIDE = sorted(path for path in SOURCE.rglob("*.py") if BUILDERS not in path.parents)


# Tuples: a union is made anew wherever it is asked about, which is millions of times here.
OWNERS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
CHOICES = (ast.Compare, ast.MatchValue)
DECISIONS = (ast.IfExp, ast.Compare, ast.Subscript, ast.Call)
WRITTEN = (ast.JoinedStr, ast.Dict, ast.List, ast.ListComp)

# A method may share its name with an option; such a word counts only where it can mean the method.
ALSO_OPTIONS = {option for method in METHODS.values() for option in method.options()}


def documentation(tree: ast.Module) -> set[int]:
    """Ids of the constants that are docstrings."""
    return {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, OWNERS) and node.body and isinstance(node.body[0], ast.Expr)
    }


def named_methods(tree: ast.Module) -> list[str]:
    """Method names that stand in the code as whole literals."""
    passed_over = documentation(tree)
    places = []
    for parent in ast.walk(tree):
        chooses = isinstance(parent, CHOICES) or (
            (isinstance(parent, ast.keyword) and parent.arg == "method")
            or (isinstance(parent, ast.Subscript) and isinstance(parent.ctx, ast.Load))
        )
        for node in ast.iter_child_nodes(parent):
            if not isinstance(node, ast.Constant) or id(node) in passed_over:
                continue
            if node.value in METHODS and (chooses or node.value not in ALSO_OPTIONS):
                places.append(f"line {node.lineno}: {node.value!r}")
    return places


def methods_read(tree: ast.AST) -> list[int]:
    """Lines where `.method` of something is read for more than to be written out.

    Written out means: inside an f-string, or in a dict or list (text, JSON, rows of a table), or
    passed on as `method=`. What the caller asked for (`args.method`) is no plan's.
    """
    lines, to_come = list[int](), [(tree, False)]
    while to_come:
        node, written_out = to_come.pop()
        written_out |= isinstance(node, WRITTEN)
        written_out |= isinstance(node, ast.keyword) and node.arg == "method"
        if isinstance(node, ast.Attribute) and node.attr == "method":
            asked = isinstance(node.value, ast.Name) and node.value.id == "args"
            if not written_out and not asked:
                lines.append(node.lineno)
        decides = isinstance(node, DECISIONS)
        to_come += [(child, written_out and not decides) for child in ast.iter_child_nodes(node)]
    return lines


def test_no_file_outside_the_builders_names_a_method_or_asks_for_it() -> None:
    for path in OUTSIDE:
        tree = ast.parse(path.read_text())
        assert named_methods(tree) == [], path
        assert methods_read(tree) == [], path


def test_the_check_sees_what_it_should_see() -> None:
    def names_in(source: str) -> list[str]:
        return named_methods(ast.parse(source))

    assert names_in("if name == 'ring': pass") == ["line 1: 'ring'"]
    assert names_in('"""ring"""\nprog = "mesh-attention"') == []
    assert names_in("options = ('tile', 'ulysses')\ngiven['ulysses'] = 4") == []
    assert names_in("build = builders['ulysses']") == ["line 1: 'ulysses'"]
    assert len(names_in("x == 'ulysses' or make_plan(p, 4, method='ulysses')")) == 2
    for wrong in ("if plan.method: x = 1", "f'{a if plan.method else b}'", "d = {1: t[p.method]}"):
        assert methods_read(ast.parse(wrong)) == [1]
    for right in (
        "print(f'{plan.method} on 4')",
        "d = {'method': plan.method}",
        "f(args.method)",
        "ask(method=answer.method)",
    ):
        assert methods_read(ast.parse(right)) == []


def test_the_builders_are_where_the_check_expects_them() -> None:
    assert all((BUILDERS / name).exists() for name in ("table.py", "question.py", "parts"))
    assert len(OUTSIDE) > 50
