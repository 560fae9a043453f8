"""The same bits every time: whether the caller asks for it, and how PyTorch's ops are told."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum

import torch


class Determinism(StrEnum):
    """What is asked for."""

    ANY = "any"
    PREFERRED = "preferred"  # a warning where no kernel can
    REQUIRED = "required"  # an error there
    ANY_RANKS = "any ranks"  # besides, the bits that any other number of ranks gives


def asked_of_torch() -> Determinism:
    """By `torch.use_deterministic_algorithms`."""
    if not torch.are_deterministic_algorithms_enabled():
        return Determinism.ANY
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    return Determinism.PREFERRED if warns else Determinism.REQUIRED


@contextmanager
def deterministic_algorithms(wanted: bool) -> Iterator[None]:
    """Some of PyTorch's ops are asked by a switch of the whole process, and in no other way."""
    if not wanted or asked_of_torch() is Determinism.REQUIRED:
        yield
        return
    was = torch.are_deterministic_algorithms_enabled()
    warned = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was, warn_only=warned)
