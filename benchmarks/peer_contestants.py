"""Who takes part in `against_peers.py`: PyTorch's context parallelism, Ulysses by hand, and ours.

`CONTESTANTS` lists them by name with their options. Options may also follow a name on the command
line, as in `default,keep=gathered`: those of a method go to the search of its plan, the others to
`ContextParallel`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from mesh_attention import ContextParallel
from mesh_attention.choose.auto import find_best, question_of
from mesh_attention.errors import PlanError
from mesh_attention.machine.cluster import Cluster
from mesh_attention.measure.ranks import Ranks
from mesh_attention.measure.tune import tune_ranks
from mesh_attention.plan.language.text import digest
from mesh_attention.plan.methods.table import METHODS
from mesh_attention.plan.problem.mask import Mask
from mesh_attention.plan.problem.problem import Problem

Options = Mapping[str, Any]
HAND, DEFAULT = "hand-ulysses", "default"
TUNING_SECONDS = 0.5  # of one measurement, about


@dataclass(frozen=True)
class Cell:
    """What is computed: all contestants of a cell get the same tensors."""

    tokens: int
    heads: int
    kv_heads: int
    dim: int
    causal: bool
    dtype: torch.dtype

    @property
    def problem(self) -> Problem:
        return Problem(
            self.tokens,
            self.heads,
            self.dim,
            num_kv_heads=self.kv_heads,
            element_bytes=self.dtype.itemsize,
            mask=Mask(causal=self.causal),
        )

    @property
    def name(self) -> str:
        mask = "causal" if self.causal else "full"
        return f"{self.tokens}-{self.heads}x{self.kv_heads}x{self.dim}-{mask}"


@dataclass(frozen=True)
class Surroundings:
    """Where a contestant runs: `cluster` was profiled on these ranks, `folder` is for files."""

    ranks: Ranks
    cluster: Cluster
    folder: Path
    measurements: int  # of a tuning


class Contestant:
    """On one rank. Tensors come as (1, tokens, heads, head_dim) and are cut by `shard`."""

    setting = ""  # in words
    received = (0, 0)  # bytes, forward and backward, once both have run

    @classmethod
    def variants(cls, cell: Cell, options: Options) -> list[Options]:
        """What to try, in this order, until something runs and is exact."""
        return [options]

    def shard(self, whole: Tensor) -> Tensor:
        raise NotImplementedError

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        raise NotImplementedError

    def around(self) -> AbstractContextManager[None]:
        """Entered before a call is timed, left after its backward pass."""
        return nullcontext()

    def key(self) -> str:
        """Contestants with the same do the same; empty: like nobody else."""
        return ""

    def check(self) -> None:
        """Raises if a call went wrong, and counts the bytes of one."""

    def close(self) -> None:
        pass


class TorchRing(Contestant):
    """`context_parallel`: SDPA is replaced inside its block, and cuts tensors as it wants them.

    sdpa        name of the backend, where PyTorch's own choice fails
    repeat_kv   each query head has a KV head of its own, where GQA fails
    """

    def __init__(
        self,
        cell: Cell,
        here: Surroundings,
        *,
        rotate: str,
        sdpa: str = "",
        repeat_kv: bool = False,
    ) -> None:
        # Private in all versions, and the only way to choose rotation and load balance.
        from torch.distributed.tensor.experimental import _attention

        self._torch: Any = _attention
        self._cell, self._size, self._rotate = cell, here.ranks.size, rotate
        self._device = here.ranks.device
        if self._device.type == "cpu":
            raise PlanError("context_parallel has no ring for SDPA on CPUs, forward or backward")
        self._mesh = init_device_mesh(self._device.type, (self._size,))
        self._backend = SDPBackend.__members__[sdpa] if sdpa else None
        self._times = cell.heads // cell.kv_heads if repeat_kv else 1
        self.setting = f"{sdpa or 'SDPA as PyTorch chooses'}{', KV repeated' * repeat_kv}"

    @classmethod
    def variants(cls, cell: Cell, options: Options) -> list[Options]:
        repeated = (False,) if cell.heads == cell.kv_heads else (False, True)
        return [
            {**options, "sdpa": sdpa, "repeat_kv": repeat_kv}
            for repeat_kv in repeated
            for sdpa in ("", "FLASH_ATTENTION")
        ]

    @contextmanager
    def _block(self, buffer: Tensor) -> Iterator[None]:
        """A whole tensor (1, heads, tokens, head_dim) is this rank's shard inside."""
        # Its load balance is for causal masks only.
        self._torch._cp_options.enable_load_balance = self._cell.causal
        self._torch.set_rotate_method(self._rotate)
        with self._torch.context_parallel(
            self._mesh, buffers=[buffer], buffer_seq_dims=[2], no_restore_buffers={buffer}
        ):
            yield

    def shard(self, whole: Tensor) -> Tensor:
        buffer = whole.transpose(1, 2).clone(memory_format=torch.contiguous_format)
        with self._block(buffer):
            return buffer.clone()

    @contextmanager
    def around(self) -> Iterator[None]:
        # Something to cut is needed; were it not cut evenly, nothing would be balanced.
        smallest = torch.zeros(1, 1, 2 * self._size, 1, device=self._device)
        chosen = nullcontext() if self._backend is None else sdpa_kernel(self._backend)
        with self._block(smallest), chosen:
            yield

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self._times > 1:
            k, v = (x.repeat_interleave(self._times, 1) for x in (k, v))
        grouped = q.shape[1] != k.shape[1]
        return functional.scaled_dot_product_attention(
            q, k, v, is_causal=self._cell.causal, enable_gqa=grouped
        )

    def check(self) -> None:
        """By its code: all other shards of K and V in each pass, and n times those of dK and dV in
        float32."""
        cell, n = self._cell, self._size
        elements = 2 * cell.tokens // n * cell.kv_heads * self._times * cell.dim
        forward = (n - 1) * elements * cell.dtype.itemsize
        self.received = (forward, forward + n * elements * 4)


class Exchange(torch.autograd.Function):
    """Part i of the first dimension goes to rank i, and gradients come back the same way."""

    received = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x)
        Exchange.received += x.nbytes - x[0].nbytes
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return Exchange.forward(ctx, grads[0].contiguous())


class HandUlysses(Contestant):
    """All-to-all, SDPA, all-to-all: autograd keeps what was exchanged, and nothing is hidden."""

    def __init__(self, cell: Cell, here: Surroundings) -> None:
        self._causal, self._n, self._rank = cell.causal, here.ranks.size, here.ranks.rank
        if cell.heads % self._n or (cell.kv_heads % self._n and self._n % cell.kv_heads):
            raise PlanError(
                f"{cell.heads}:{cell.kv_heads} heads cannot be dealt to {self._n} ranks"
            )

    def shard(self, whole: Tensor) -> Tensor:
        return whole.chunk(self._n, 1)[self._rank].clone()

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        Exchange.received = 0
        shape, n = q.shape, self._n
        q, k, v = (self._heads(x) for x in (q, k, v))
        if not self.setting:
            grouped = q.shape[1] != k.shape[1]
            chosen = torch._fused_sdp_choice(q, k, v, is_causal=self._causal, enable_gqa=grouped)
            self.setting = f"SDPA by {SDPBackend(chosen).name}"
        out = functional.scaled_dot_product_attention(
            q, k, v, is_causal=self._causal, enable_gqa=q.shape[1] != k.shape[1]
        )
        parts = out.transpose(1, 2).reshape(n, shape[1], shape[2] // n, shape[3])
        exchanged: Tensor = Exchange.apply(parts.contiguous())  # type: ignore[no-untyped-call]
        self._forward = Exchange.received
        return exchanged.transpose(0, 1).reshape(shape)

    def _heads(self, x: Tensor) -> Tensor:
        """Some heads of all tokens, (1, heads, tokens, head_dim), for all heads of some tokens."""
        n, (_, tokens, heads, dim) = self._n, x.shape
        if heads < n:
            x = x.repeat_interleave(n // heads, 2)
        parts = x.reshape(tokens, n, -1, dim).transpose(0, 1).contiguous()
        exchanged: Tensor = Exchange.apply(parts)  # type: ignore[no-untyped-call]
        return exchanged.reshape(1, n * tokens, -1, dim).transpose(1, 2)

    def check(self) -> None:
        self.received = (self._forward, Exchange.received - self._forward)


class Ours(Contestant):
    """`ContextParallel` with the cluster that was profiled. A method is searched by that cluster,
    where it is named; `tuned` is what `mesh-attention tune` measures to be the fastest."""

    def __init__(
        self,
        cell: Cell,
        here: Surroundings,
        *,
        method: str | None = None,
        tuned: bool = False,
        **options: Any,
    ) -> None:
        ranks, cluster = here.ranks, here.cluster
        arguments: dict[str, Any] = {
            "seq_len": cell.tokens,
            "num_heads": cell.heads,
            "num_kv_heads": cell.kv_heads,
            "head_dim": cell.dim,
            "causal": cell.causal,
            "dtype": cell.dtype,
            "cluster": cluster,
        }
        if tuned:
            file = here.folder / f"tuned-{ranks.size}.json"
            effort: dict[str, Any] = {"measurements": here.measurements, "lasting": TUNING_SECONDS}
            tune_ranks(ranks, cell.problem, cluster, output=file, **effort)
            arguments |= {"tuned": file, "cluster": None}
        if method is not None:
            known = METHODS[method].options()
            fixed = {name: options.pop(name) for name in [*options] if name in known}
            chosen = ranks.of_first(lambda: _searched(cell, here, method, fixed))
            plan = question_of(cluster, cell.problem, ranks.size, chosen).plan()
            arguments = {"plan": plan, "cluster": cluster}
        self._cp = ContextParallel(ranks.group, **arguments, **options)
        self._key = f"{digest(self._cp.plan)} {sorted(options.items())} {tuned}"
        self.setting = self._cp.choice

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
        method=method,
        options=fixed,
        moves_tokens=False,
    )
    return {direction: (x.name, x.options) for direction, x in best.chosen.items()}


@dataclass(frozen=True)
class Entry:
    """A row of `CONTESTANTS`. An option that is a function is called with the number of ranks."""

    kind: type[Contestant]
    options: Options
    least_ranks: int = 2

    def variants(self, cell: Cell, num_ranks: int) -> list[Options]:
        if num_ranks < self.least_ranks:
            raise PlanError(f"on {num_ranks} ranks it is another method; {self.least_ranks} needed")
        options = {n: x(num_ranks) if callable(x) else x for n, x in self.options.items()}
        return self.kind.variants(cell, options)

    def make(self, cell: Cell, here: Surroundings, options: Options) -> Contestant:
        kind: Any = self.kind  # each takes options of its own
        contestant: Contestant = kind(cell, here, **options)
        return contestant


CONTESTANTS: dict[str, Entry] = {
    "torch-allgather": Entry(TorchRing, {"rotate": "allgather"}),
    "torch-alltoall": Entry(TorchRing, {"rotate": "alltoall"}),
    HAND: Entry(HandUlysses, {}),
    DEFAULT: Entry(Ours, {}),
    "tuned": Entry(Ours, {"tuned": True}),
    "ring": Entry(Ours, {"method": "ring"}),
    "mesh": Entry(Ours, {"method": "mesh"}),
    "ulysses": Entry(Ours, {"method": "ulysses"}),
    "usp": Entry(Ours, {"method": "usp", "ulysses": lambda n: n // 2}, least_ranks=4),
    "mesh-usp": Entry(Ours, {"method": "mesh-usp", "ulysses": 2}, least_ranks=4),
}


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
