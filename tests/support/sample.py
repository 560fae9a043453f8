"""Of a sweep a few values for every run of the tests; the others are slow ones."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def sample(values: Iterable[Any], every: int) -> list[Any]:
    """The first of `every` so many as it is, the others marked as slow.

    >>> sample("abc", 2)[::2]
    ['a', 'c']
    """
    return [
        value if at % every == 0 else pytest.param(*_arguments(value), marks=pytest.mark.slow)
        for at, value in enumerate(values)
    ]


def in_parts(number: int) -> pytest.MarkDecorator:
    """Of a test that tries many random cases: `seed` is one of so many, of which every run has the
    first."""
    return pytest.mark.parametrize("seed", sample(range(number), number))


def _arguments(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)
