"""Fixtures for all tests. Nothing here imports torch unless a test does."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from support.pool import WorkerPool


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    if "torch" in sys.modules:
        import torch

        torch.set_num_threads(1)


@pytest.fixture(scope="session")
def pool() -> Iterator[WorkerPool]:
    """Processes that form gloo groups; started when the first test asks for them."""
    from support.pool import WorkerPool

    workers = WorkerPool()
    yield workers
    workers.close()
