"""Names say what a thing is: words that could mean anything name nothing here."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import mesh_attention

ROOT = Path(mesh_attention.__path__[0])
AROUND = [ROOT.parents[1] / folder for folder in ("tests", "benchmarks", "examples", "docs")]
EMPTY_WORDS = ("one", "found", "given", "mine", "told")


def empty_words(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.arg(arg=name) | ast.Attribute(attr=name):
                pass
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                pass
            case ast.ExceptHandler(name=str(name)):
                pass
            case _:
                continue
        if name.strip("_") in EMPTY_WORDS:
            yield name


def tricks(tree: ast.AST) -> Iterator[str]:
    """`f(*(a, b))` saves lines and hides what each argument is; so does `locals()`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            if any(
                isinstance(x, ast.Starred) and isinstance(x.value, ast.Tuple) for x in node.args
            ):
                yield "*(...)"
            if isinstance(node.func, ast.Name) and node.func.id == "locals":
                yield "locals()"


def test_no_name_is_an_empty_word_and_no_call_spreads_a_tuple_to_save_lines() -> None:
    for file in ROOT.rglob("*.py"):
        tree = ast.parse(file.read_text())
        assert list(empty_words(tree)) == [], file
        # Triton compiles its kernels from their source, in which tuples are groups of strides.
        if file.parent.name != "fused":
            assert list(tricks(tree)) == [], file


def test_no_name_around_the_library_is_an_empty_word() -> None:
    files = [file for folder in AROUND for file in folder.rglob("*.py")]
    assert len(files) > 200
    for file in files:
        # The decorator of hypothesis, which `property.py` wraps.
        words = [x for x in empty_words(ast.parse(file.read_text())) if x != "given"]
        assert words == [], file


@pytest.mark.parametrize(
    "text", ["found = 1", "def f(given): ...", "x.told", "def mine(): ...", "lambda one: 0"]
)
def test_an_empty_word_is_seen(text: str) -> None:
    assert list(empty_words(ast.parse(text)))


@pytest.mark.parametrize("text", ["f(*(a, b))", "locals()"])
def test_a_trick_is_seen(text: str) -> None:
    assert list(tricks(ast.parse(text)))
