"""Commands that run on real ranks: started by torchrun, and heard from one rank only."""

from __future__ import annotations

import os
from collections.abc import Callable

from mesh_attention.cli.command import UsageError
from mesh_attention.measure.ranks import MeasureError, Ranks, ranks_of_launcher


def on_ranks(command: str, ranks_per_node: int | None, work: Callable[[Ranks], int]) -> int:
    """`command` is what a person would start. What is wrong is wrong on all ranks, and the first
    one says it."""
    try:
        with ranks_of_launcher(ranks_per_node, command=command) as ranks:
            return work(ranks)
    except (MeasureError, UsageError):
        if os.environ.get("RANK", "0") == "0":
            raise
        return 2
