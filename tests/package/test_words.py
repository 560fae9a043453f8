"""Names say what a thing is: words that could mean anything name nothing here."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from types import CodeType

import pytest

import mesh_attention

ROOT = Path(mesh_attention.__path__[0])
AROUND = [ROOT.parents[1] / folder for folder in ("tests", "benchmarks", "examples", "docs")]
EMPTY_WORDS = ("one", "found", "given", "mine", "told")


def empty_words(text: str) -> list[str]:
    """Of variables, arguments, attributes, functions and classes. The compiler lists them: to walk
    all trees takes five times as long."""
    return [name for name in names(compile(text, "text", "exec")) if name.strip("_") in EMPTY_WORDS]


def names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    yield from code.co_varnames
    yield from code.co_cellvars
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield inner.co_name
            yield from names(inner)


def tricks(text: str) -> Iterator[str]:
    """`f(*(a, b))` saves lines and hides what each argument is; so does `locals()`."""
    if "*(" not in text and "locals(" not in text:
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call):
            if any(
                isinstance(x, ast.Starred) and isinstance(x.value, ast.Tuple) for x in node.args
            ):
                yield "*(...)"
            if isinstance(node.func, ast.Name) and node.func.id == "locals":
                yield "locals()"


def test_no_name_is_an_empty_word_and_no_call_spreads_a_tuple_to_save_lines() -> None:
    for file in ROOT.rglob("*.py"):
        text = file.read_text()
        assert empty_words(text) == [], file
        # Triton compiles its kernels from their source, in which tuples are groups of strides.
        if file.parent.name != "fused":
            assert list(tricks(text)) == [], file


def test_no_name_around_the_library_is_an_empty_word() -> None:
    files = [file for folder in AROUND for file in folder.rglob("*.py")]
    assert len(files) > 200
    for file in files:
        # The decorator of hypothesis, which `property.py` wraps.
        words = [x for x in empty_words(file.read_text()) if x != "given"]
        assert words == [], file


@pytest.mark.parametrize(
    "text",
    [
        "found = 1",
        "def f(given): ...",
        "x.told",
        "def mine(): ...",
        "lambda one: 0",
        "def f(told): return lambda: told",
    ],
)
def test_an_empty_word_is_seen(text: str) -> None:
    assert empty_words(text)


@pytest.mark.parametrize("text", ["f(*(a, b))", "locals()"])
def test_a_trick_is_seen(text: str) -> None:
    assert list(tricks(text))
