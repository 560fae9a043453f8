"""Who takes part in `against_peers.py`: PyTorch, Ulysses by hand, other libraries, and ours.

`CONTESTANTS` lists them by name with their options. Options may also follow a name on the command
line, as in `default,keep=gathered`: those of a method go to the search of its plan, the others to
`ContextParallel`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from peer_cell import Cell, Contestant, Surroundings
from peer_libraries import (
    HandUlysses,
    Llama3FlashAttention,
    RingFlashAttention,
    TorchRing,
    Yunchang,
)
from torch import Tensor

from mesh_attention import ContextParallel
from mesh_attention.choose.auto import find_best, question_of
from mesh_attention.cost import simulate
from mesh_attention.errors import PlanError
from mesh_attention.plan.language.plan import Direction
from mesh_attention.plan.language.text import digest
from mesh_attention.plan.methods.table import AUTO, METHODS

HAND, DEFAULT = "hand-ulysses", "default"
Options = Mapping[str, Any]


class Ours(Contestant):
    """`ContextParallel` with the cluster that was profiled. A method is searched by that cluster,
    where it is named, and over all methods and places of tokens where it is `auto`."""

    def __init__(
        self, cell: Cell, here: Surroundings, *, method: str | None = None, **options: Any
    ) -> None:
        super().__init__(cell, here)
        ranks, cluster = here.ranks, here.cluster
        arguments: dict[str, Any] = {
            "seq_len": cell.tokens,
            "num_heads": cell.heads,
            "num_kv_heads": cell.kv_heads,
            "head_dim": cell.dim,
            "mask": cell.mask,
            "dtype": cell.dtype,
            "cluster": cluster,
        }
        if method is not None:
            known = METHODS[method].options() if method in METHODS else {}
            fixed = {name: options.pop(name) for name in [*options] if name in known}
            chosen = ranks.of_first(lambda: _searched(cell, here, method, fixed))
            plan = question_of(cluster, cell.problem, ranks.size, chosen).plan()
            arguments = {"plan": plan, "cluster": cluster}
        cp = self._cp = ContextParallel(ranks.group, **arguments, **options)
        self._key = f"{digest(self._cp.plan)} {sorted(options.items())}"
        self.setting = self._cp.choice
        self.predicted = ranks.of_first(
            lambda: sum(simulate(cp.plan, cluster, way).runtime_seconds for way in Direction)
        )

    def shard(self, whole: Tensor) -> Tensor:
        return self._cp.shard(whole, 1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = self._cp.attention(q, k, v)
        assert isinstance(out, Tensor)
        return out

    def key(self) -> str:
        return self._key

    def check(self) -> None:
        self._cp.check()
        traffic = self._cp.traffic
        totals = [traffic[name].total.received_bytes for name in ("forward", "backward")]
        self.received = (totals[0], totals[1])
        asked = [pair for pairs in self._cp.kernels().values() for pair in pairs]
        chosen = dict.fromkeys(name for name, why in asked if why.startswith("chosen"))
        self.setting += f"; kernels: {', '.join(chosen)}"

    def close(self) -> None:
        self._cp.close()


def _searched(
    cell: Cell, here: Surroundings, method: str, fixed: Options
) -> dict[Any, tuple[str, dict[str, Any]]]:
    best = find_best(
        cell.problem,
        here.ranks.size,
        here.cluster,
        method=None if method == AUTO else method,
        options=fixed,
        moves_tokens=method == AUTO,
    )
    return {direction: (x.name, x.options) for direction, x in best.chosen.items()}


@dataclass(frozen=True)
class Entry:
    """A row of `CONTESTANTS`. An option that is a function is called with the number of ranks."""

    kind: type[Contestant]
    options: Options
    least_ranks: int = 2

    def options_on(self, num_ranks: int) -> Options:
        if num_ranks < self.least_ranks:
            raise PlanError(f"on {num_ranks} ranks it is another method; {self.least_ranks} needed")
        return {n: x(num_ranks) if callable(x) else x for n, x in self.options.items()}

    def make(self, cell: Cell, here: Surroundings) -> Contestant:
        kind: Any = self.kind  # each takes options of its own
        contestant: Contestant = kind(cell, here, **self.options_on(here.ranks.size))
        return contestant


CONTESTANTS: dict[str, Entry] = {
    "torch-allgather": Entry(TorchRing, {"rotate": "allgather"}),
    "torch-alltoall": Entry(TorchRing, {"rotate": "alltoall"}),
    HAND: Entry(HandUlysses, {}),
    "ring-flash-attn": Entry(RingFlashAttention, {}),
    "ring-flash-attn-llama3": Entry(Llama3FlashAttention, {}),
    "yunchang-ulysses": Entry(Yunchang, {"ulysses": lambda n: n}),
    "yunchang-usp": Entry(Yunchang, {"ulysses": lambda n: n // 2}, least_ranks=4),
    DEFAULT: Entry(Ours, {}),
    "ring": Entry(Ours, {"method": "ring"}),
    "mesh": Entry(Ours, {"method": "mesh"}),
    "ulysses": Entry(Ours, {"method": "ulysses"}),
    "usp": Entry(Ours, {"method": "usp", "ulysses": lambda n: n // 2}, least_ranks=4),
    "mesh-usp": Entry(Ours, {"method": "mesh-usp", "ulysses": 2}, least_ranks=4),
    "startrail": Entry(Ours, {"method": "startrail", "team": 2}, least_ranks=4),
    "allgather-kv": Entry(Ours, {"method": "allgather-kv"}),
    AUTO: Entry(Ours, {"method": AUTO}),
}


PEERS = [*CONTESTANTS][: [*CONTESTANTS].index(DEFAULT) + 1]


def entry_of(text: str) -> Entry:
    """A name of `CONTESTANTS`, and options after it.

    >>> entry_of("mesh,tile=(2, 2),keep=gathered").options
    {'method': 'mesh', 'tile': (2, 2), 'keep': 'gathered'}
    """
    name, *words = re.split(r",(?=\w+=)", text)
    if name not in CONTESTANTS:
        raise ValueError(f"unknown contestant {name}; known: {', '.join(CONTESTANTS)}")
    options = dict(word.split("=", 1) for word in words)
    read = {key: _value(value) for key, value in options.items()}
    entry = CONTESTANTS[name]
    return replace(entry, options={**entry.options, **read})


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
