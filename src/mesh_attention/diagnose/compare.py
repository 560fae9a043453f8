"""What ranks computed, put in the order of the tokens and held against one process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import inf, isfinite
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mesh_attention.diagnose.report import Limits
from mesh_attention.diagnose.runs import StepRun
from mesh_attention.request.port_checks import other_ways
from mesh_attention.runtime.session.sharding import Shards

Positions = NDArray[np.int64]
_SMALL_LOSS = 1e-2  # losses that are sums of both signs may be 0


@dataclass(frozen=True)
class Activations:
    """What modules and attention computed, on one process and on ranks (`record.py`).

    whole    of one process, by name: (rows, tokens, numbers)
    ranks    the same of each rank of the group, (rows, slots, numbers)
    shards   how the object lays out tokens
    real     (rows, tokens), False at padding, where ranks and one process may differ
    """

    whole: dict[str, Tensor]
    ranks: list[dict[str, Tensor]]
    shards: Shards | None
    real: Tensor
    limits: Limits

    @cached_property
    def errors(self) -> dict[str, Tensor]:
        """By name, the error of each token as a part of the largest number, where both sides have
        computed it."""
        if self.shards is None:
            return {}
        right = self.positions()
        both = {name: self.errors_if(name, right) for name in self.whole}
        return {name: errors for name, errors in both.items() if errors is not None}

    @property
    def first(self) -> str | None:
        """The first name that differs, in the order in which one process computed them."""
        return next((name for name in self.errors if self.is_wrong(name)), None)

    def is_wrong(self, name: str) -> bool:
        return name in self.errors and bool(self.wrong_tokens(name).any())

    def wrong_tokens(self, name: str) -> Tensor:
        return self.errors[name] > self.limits[name]

    def wrong_ranks(self, name: str) -> list[int]:
        wrong = self.wrong_tokens(name).any(0).numpy()
        of_ranks = enumerate(self.positions())
        return [rank for rank, at in of_ranks if wrong[at[at < len(wrong)]].any()]

    def positions(self) -> list[Positions]:
        """For each rank of the group, the positions of its slots in the whole sequence."""
        assert self.shards is not None
        layout = self.shards.q_layout
        return [layout.positions(rank) for rank in range(layout.num_ranks)]

    def other_positions(self) -> Iterator[tuple[str, list[Positions]]]:
        """The same for each other way in which people cut sequences, with the name of the way."""
        assert self.shards is not None
        size, layout = len(self.ranks), self.shards.q_layout
        ways = [dict(other_ways(layout, self.shards.starts[0], r)) for r in range(size)]
        for name in ways[0]:
            yield name, [way[name] for way in ways]

    def errors_if(self, name: str, positions: list[Positions]) -> Tensor | None:
        """The error of each token if the slots of ranks lay at these positions; None where ranks
        did not compute it, or in shapes that do not fit."""
        whole, real = self.whole[name], self.real
        parts = [rank[name] for rank in self.ranks if name in rank]
        if len(parts) < len(self.ranks):
            return None
        if len(whole) > 1 and len(parts[0]) == 1:  # one pack of all rows
            whole = whole.flatten(0, 1)[None]
        if self.shards is None or whole.shape[1] != self.shards.q_layout.num_tokens:
            return None  # positions that are the same for all rows, say, of which one pack is made
        real = real if real.shape[1] == whole.shape[1] else real.flatten()[None]
        scale, errors = whole.abs().max() + 1e-30, torch.zeros(whole.shape[:2])
        for x, at in zip(parts, positions, strict=True):
            if x.shape != (len(whole), len(at), *whole.shape[2:]):
                return None
            inside = torch.from_numpy(at < whole.shape[1])
            at_tokens = torch.from_numpy(at)[inside]
            off = (x[:, inside] - whole[:, at_tokens]).abs().amax(-1) / scale
            errors[:, at_tokens] = torch.nan_to_num(off, nan=torch.inf).float()
        return errors.masked_fill(~real.all(0) if len(real) > len(errors) else ~real, 0)


@dataclass(frozen=True)
class ComparedGradients:
    """
    errors    of each parameter, relative to its largest number, or to 1/1000 of the largest of all
    factors   by how much each is too large, if it is only that; None where it is not
    """

    errors: dict[str, float]
    factors: dict[str, float | None]

    @staticmethod
    def of(
        group: dist.ProcessGroup | None,
        ours: dict[str, Tensor | None],
        whole: dict[str, Tensor | None],
        limits: Limits,
    ) -> ComparedGradients:
        """Compares gradients of ranks with those of one process. Ranks hold parts of them, or the
        same gradients: sums over ranks have the right ratios either way."""
        pairs = {n: (_wide(ours[n], x), _wide(x, x)) for n, x in whole.items() if x is not None}
        products = [[float((a * b).sum()), float((b * b).sum())] for a, b in pairs.values()]
        sums = np.sum(gathered(group, products), 0).tolist()
        largest = [[_largest(a - b), _largest(b)] for a, b in pairs.values()]
        most = np.max(gathered(group, largest), 0).tolist()
        floor = max((scale for _, scale in most), default=0.0) * 1e-3 + 1e-30
        ratios = [product / (square + 1e-300) for product, square in sums]
        scaled = zip(pairs.values(), ratios, strict=True)
        off = np.max(gathered(group, [_largest(a - b * c) for (a, b), c in scaled]), 0).tolist()
        errors, factors = {}, {}
        for name, (error, own), ratio, rest in zip(pairs, most, ratios, off, strict=True):
            scale = max(own, floor)
            errors[name] = error / scale
            factors[name] = ratio if rest <= limits[name] * scale * max(1, abs(ratio)) else None
        return ComparedGradients(errors, factors)


def loss_of(group: Any, ours: StepRun, whole: float) -> float:
    """The loss of all ranks. Where each rank has its own, it is their mean, as frameworks that
    average gradients have it, or their sum: the nearer to the `whole`, that of one process."""
    if ours.is_of_all:
        return ours.value
    values: list[float] = gathered(group, ours.value)
    return min(sum(values) / len(values), sum(values), key=lambda x: abs(x - whole))


def loss_error(loss: float, whole: float) -> float:
    error = abs(loss - whole) / max(abs(whole), _SMALL_LOSS)
    return error if isfinite(error) else inf


def largest_error(x: Tensor, true: Tensor) -> float:
    return float((x - true).abs().max() / (true.abs().max() + 1e-30))


def added_up(
    own: nn.Module, group: Any, ours: StepRun, whole: StepRun, limits: Limits
) -> dict[str, ComparedGradients]:
    """Compares the sum and the mean of the gradients that ranks have before a caller reduces them.
    Empty for FSDP2, where ranks hold parts."""
    if any(isinstance(p, DTensor) for p in own.parameters()):
        return {}
    apart = ours.apart or ours.grads
    summed = {name: None if x is None else x.clone() for name, x in apart.items()}
    for grad in summed.values():
        if grad is not None:
            dist.all_reduce(grad, group=group)
    ways = {}
    for way, divisor in ("sum", 1), ("mean", dist.get_world_size(group)):
        parts = {name: None if x is None else x.div_(divisor) for name, x in summed.items()}
        ways[way] = ComparedGradients.of(group, parts, whole.grads, limits)
    return ways


def factors_of_ranks(group: Any, ours: StepRun, wrong: list[str]) -> list[float]:
    """By what each rank multiplied the largest of the `wrong` gradients before they were reduced by
    hand, as a part of the largest factor; empty where factors alone do not explain the result."""
    both = [(ours.apart[name], ours.grads[name]) for name in wrong]
    pairs = [(torch.zeros_like(b) if a is None else a, b) for a, b in both if b is not None]
    if not pairs:
        return []
    own, reduced = max(pairs, key=lambda pair: pair[0].numel())
    parts = gathered(group, own.flatten().double().cpu())
    of_ranks, total = torch.stack(parts, 1), reduced.flatten().double().cpu()
    factors = torch.linalg.lstsq(of_ranks, total[:, None]).solution.flatten()
    is_that = torch.allclose(of_ranks @ factors, total, rtol=1e-4, atol=1e-4 * _largest(total))
    if not is_that or len(total) <= len(parts) or factors.min() <= 0:
        return []
    relative: list[float] = (factors / factors.max()).tolist()
    return relative


def _wide(x: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like, dtype=torch.float64) if x is None else x.double()


def _largest(x: Tensor) -> float:
    return float(torch.nan_to_num(x.abs(), nan=torch.inf).max()) if x.numel() else 0.0


def gathered(group: Any, value: Any) -> list[Any]:
    """The values of all processes, sent as objects: they are few, and any backend sends objects."""
    values = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group)
    return values
