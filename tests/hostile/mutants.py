"""Mistakes put into the library on purpose: a campaign that does not find them proves nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

__all__ = ["CAUGHT_BY", "MUTANTS", "mutate_for_good", "mutated"]

Change = tuple[Any, str, Any]  # an attribute, and what it becomes


def guard_that_compares_nothing() -> list[Change]:
    """Ranks meet at the begin of a call, and whatever they are at, they go on."""
    from mesh_attention.runtime.agreement.identity import HostComparison

    compare = HostComparison.agrees

    def agrees(self: HostComparison, *call: Any, **options: Any) -> bool:
        compare(self, *call, **options)
        return True

    return [(HostComparison, "agrees", agrees)]


def layout_that_swaps_halves() -> list[Change]:
    """Tensors are cut with the two halves of a rank's rows in the other order than plans say."""
    from mesh_attention.plan.problem.layout import Layout

    positions = Layout.positions

    def swapped(self: Layout, rank: int) -> Any:
        return np.roll(positions(self, rank), self.slots // 2)

    return [(Layout, "positions", swapped)]


def verify_that_ignores_rows() -> list[Change]:
    """Operands of an operation may hold different tokens or heads."""
    from mesh_attention.plan.read.verify.compute import SymbolicCompute

    return [(SymbolicCompute, "_same_rows", lambda *_: None)]


def numbers_of_any_kind() -> list[Change]:
    """A size is whatever was given."""
    from mesh_attention.plan.problem import mask, problem

    return [(module, "number", lambda _, value, **__: value) for module in (mask, problem)]


def refusals_that_nobody_catches() -> list[Change]:
    """The command line takes them for mistakes of its own."""
    from mesh_attention.cli import command, main

    return [(module, "MeshAttentionError", KeyError) for module in (command, main)]


MUTANTS: dict[str, Callable[[], list[Change]]] = {
    "guard": guard_that_compares_nothing,
    "layout": layout_that_swaps_halves,
    "verify": verify_that_ignores_rows,
    "arguments": numbers_of_any_kind,
    "refusals": refusals_that_nobody_catches,
}
CAUGHT_BY = {
    "guard": "programs",
    "layout": "exact",
    "verify": "plans",
    "arguments": "arguments",
    "refusals": "command_line",
}


@contextmanager
def mutated(name: str | None) -> Iterator[None]:
    """The library with that mistake, in this process."""
    changes = MUTANTS[name]() if name else []
    before = [(owner, attribute, getattr(owner, attribute)) for owner, attribute, _ in changes]
    for owner, attribute, new in changes:
        setattr(owner, attribute, new)
    try:
        yield
    finally:
        for owner, attribute, old in before:
            setattr(owner, attribute, old)


_held: dict[str, ExitStack] = {}  # a mistake ends with what holds it


def mutate_for_good(name: str | None) -> None:
    """In a process of a pool that has no other use."""
    if name and name not in _held:
        _held[name] = ExitStack()
        _held[name].enter_context(mutated(name))
