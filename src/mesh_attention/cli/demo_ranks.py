"""Nine processes over gloo that run one attention in three assignments of work.

Each case is checked against a float64 attention of the whole sequence, and its bytes are counted at
the transport. The processes report through a queue, so the parent can show progress.
"""

from __future__ import annotations

import multiprocessing as mp
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import Empty
from typing import Any

from mesh_attention.errors import MeshAttentionError

NUM_RANKS = 9
TOLERANCE = 1e-10
_TIMEOUT_SECONDS = 100
_BATCH, _TOKENS, _HEADS, _HEAD_DIM = 1, 1152, 4, 32


@dataclass(frozen=True, slots=True)
class Case:
    title: str
    tile: tuple[int, int]
    rotation: bool
    chunks: tuple[int, int]
    paper_units: int  # algorithm.md, section 3


CASES = (
    Case("rows, as Ring-Attention assigns them", (1, 9), True, (1, 3), 144),
    Case("tiles 3x3 without KV rotation", (3, 3), False, (3, 3), 84),
    Case("tiles 3x3 with KV rotation", (3, 3), True, (3, 3), 72),
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one case: units counted at the transport, and the largest error against float64."""

    case: Case
    counted_units: float
    planned_units: float
    output_error: float
    gradient_error: float

    @property
    def ok(self) -> bool:
        exact = max(self.output_error, self.gradient_error) <= TOLERANCE
        return exact and self.counted_units == self.planned_units == self.case.paper_units

    def to_json(self) -> dict[str, Any]:
        numbers = asdict(self) | {"case": self.case.title}
        return {"paper_units": self.case.paper_units, "ok": self.ok} | numbers


def run_cases(report: Callable[[str, int], None]) -> list[Outcome]:
    """Run all cases; `report(what, case index)` is told of every rank that gets somewhere."""
    context = mp.get_context("forkserver")
    # Gradients import the last one, for half a second on each rank.
    needed = ("mesh_attention.api.context_parallel", "torch.fx.experimental.symbolic_shapes")
    context.set_forkserver_preload(list(needed))
    queue: Any = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        ranks = [
            context.Process(target=_rank_main, args=(rank, store, queue), daemon=True)
            for rank in range(NUM_RANKS)
        ]
        for rank in ranks:
            rank.start()
        try:
            return _collect(queue, ranks, report)
        finally:
            for rank in ranks:
                rank.join(timeout=10)
                if rank.is_alive():
                    rank.kill()


def _collect(queue: Any, ranks: list[Any], report: Callable[[str, int], None]) -> list[Outcome]:
    counted = [0.0] * len(CASES)
    errors: dict[int, tuple[float, float, float]] = {}
    finished = 0
    while finished < NUM_RANKS:
        kind, case, content = _next_message(queue, ranks)
        if kind == "failed":
            raise MeshAttentionError(f"a rank of the demonstration failed:\n{content}")
        report(kind, case)
        if kind == "case":
            counted[case] += content
        elif kind == "checked":
            errors[case] = content
        elif kind == "finished":
            finished += 1
    return [Outcome(case, counted[i], *errors[i]) for i, case in enumerate(CASES)]


def _next_message(queue: Any, ranks: list[Any]) -> tuple[str, int, Any]:
    for _ in range(_TIMEOUT_SECONDS):
        try:
            message: tuple[str, int, Any] = queue.get(timeout=1)
            return message
        except Empty:
            dead = [i for i, rank in enumerate(ranks) if rank.exitcode not in (None, 0)]
            if dead:
                raise MeshAttentionError(f"ranks {dead} of the demonstration ended") from None
    raise MeshAttentionError(f"no rank of the demonstration answered for {_TIMEOUT_SECONDS} s")


def _rank_main(rank: int, store: str, queue: Any) -> None:
    try:
        _run_rank(rank, store, queue)
        queue.put(("finished", -1, None))
    except Exception:  # the parent shows it; a silent rank would look like a hang
        queue.put(("failed", -1, traceback.format_exc()))


def _run_rank(rank: int, store: str, queue: Any) -> None:
    import torch
    import torch.distributed as dist

    from mesh_attention.api.context_parallel import ContextParallel

    torch.set_num_threads(1)
    file_store = dist.FileStore(store, NUM_RANKS)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=file_store, rank=rank, world_size=NUM_RANKS)
    queue.put(("ready", -1, None))
    torch.manual_seed(0)
    shape = (_BATCH, _TOKENS, _HEADS, _HEAD_DIM)
    q, k, v, grad = (torch.randn(shape, dtype=torch.float64) for _ in range(4))
    sizes: Any = {"seq_len": _TOKENS, "num_heads": _HEADS, "head_dim": _HEAD_DIM, "causal": False}
    for index, case in enumerate(CASES):
        options: Any = {"tile": case.tile, "rotation": case.rotation, "chunks": case.chunks}
        with ContextParallel(dtype=torch.float64, **sizes, **options) as cp:
            local = [cp.shard(x, 1).requires_grad_() for x in (q, k, v)]
            out = cp.attention(*local)
            assert isinstance(out, torch.Tensor)
            grads = torch.autograd.grad(out, local, cp.shard(grad, 1))
            planned = cp.volume()["forward"]
            received = cp.traffic["forward"].total.token_bytes
            queue.put(("case", index, received / planned.unit_bytes))
            whole = [cp.unshard(out.detach(), 1), *(cp.unshard(x, 1) for x in grads)]
            if rank == 0:
                errors = _errors((q, k, v), grad, whole)
                queue.put(("checked", index, (float(planned.units_total), *errors)))
    dist.destroy_process_group()


def _errors(inputs: Any, grad: Any, results: list[Any]) -> tuple[float, float]:
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    leaves = [x.transpose(1, 2).clone().requires_grad_() for x in inputs]
    truth = scaled_dot_product_attention(*leaves)
    wanted = [truth.detach(), *torch.autograd.grad(truth, leaves, grad.transpose(1, 2))]
    off = [
        float((found - x.transpose(1, 2)).abs().max())
        for found, x in zip(results, wanted, strict=True)
    ]
    return off[0], max(off[1:])
