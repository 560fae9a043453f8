"""One rank runs its program, and holds every number that it is handed against the truth of the
batch at which it believes to be."""

from __future__ import annotations

import inspect
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hostile.mutants import mutate_for_good
from hostile.program import Instruction, Kind, Program
from hostile.program_truth import HEAD_DIM, HEADS, IGNORED, KV_HEADS, WINDOW, Truth
from mesh_attention import ContextParallel, MeshAttentionError, mesh_attention

__all__ = ["Event", "run"]

ALLOWED = {torch.float64: 1e-9, torch.float32: 1e-4}


@dataclass(frozen=True)
class Event:
    """`outcome`: right, wrong, told (an error of ours), raised (the program's own) or foreign (an
    error of somebody else)."""

    instruction: Instruction
    outcome: str
    words: str
    seconds: float


class OwnError(Exception):
    """What the code of the user raises."""


@dataclass(frozen=True)
class LocalBatch:
    """One rank's part. `ids` and `targets` are none where the style shards other tensors."""

    number: int
    positions: Tensor
    ids: Tensor
    targets: Tensor
    documents: Any


@dataclass(frozen=True)
class Made:
    """What a backward pass needs of its forward call."""

    out: Tensor
    leaves: list[Tensor]
    batch: LocalBatch


def run(rank: int, world_size: int, program: Program, mutant: str | None) -> list[Event]:
    mutate_for_good(mutant)
    return Rank(program).run()


class Rank:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.truth = Truth(program)
        sizes: dict[str, Any] = {}
        if program.style == "shard":
            tokens = program.documents[0][-1]
            sizes = {
                "seq_len": tokens,
                "num_heads": HEADS,
                "num_kv_heads": KV_HEADS,
                "head_dim": HEAD_DIM,
                "dtype": self.truth.dtype,
            }
        self.objects = [ContextParallel(causal=True, **sizes)]
        if program.windowed:
            self.objects.append(ContextParallel(causal=True, window_size=(WINDOW, 0), **sizes))
        for cp in self.objects:
            cp._calls.session.transports.poison = True
        self.batches: dict[tuple[int, int], LocalBatch] = {}
        self.made: dict[tuple[int, int], Made] = {}

    def run(self) -> list[Event]:
        events: list[Event] = []
        left = -1  # the step that an error ended
        for each in self.program.instructions:
            if each.step == left:
                continue
            begun = time.monotonic()
            outcome, words = self._outcome(each)
            events.append(Event(each, outcome, words, time.monotonic() - begun))
            if outcome in ("told", "raised", "foreign"):
                if self.program.after_error == "stop":
                    break
                left = each.step
        for cp in self.objects:
            cp.close()
        return events

    def _outcome(self, each: Instruction) -> tuple[str, str]:
        try:
            errors = self._do(each)
        except MeshAttentionError as error:
            return "told", f"{type(error).__name__}: {error}"
        except OwnError:
            return "raised", ""
        except Exception as error:
            return "foreign", f"{type(error).__name__}: {error}"
        wrong = {name: error for name, (error, allowed) in errors.items() if not error <= allowed}
        return ("wrong", str(wrong)) if wrong else ("right", "")

    def _do(self, each: Instruction) -> dict[str, tuple[float, float]]:
        """The distance of each number from the truth, and how much is allowed."""
        match each.kind:
            case Kind.ATTEND | Kind.FUNCTION | Kind.CHECKPOINT:
                return self._attend(each)
            case Kind.BACKWARD:
                return self._backward(each)
            case Kind.UNSHARD:
                return self._unshard(each)
            case Kind.LOSS:
                return self._loss(each)
            case Kind.SLEEP:
                time.sleep(each.seconds)
            case Kind.CLOSE:
                self.objects[-1].close()
            case Kind.RAISE:
                raise OwnError
        return {}

    # Batches.

    def _batch(self, each: Instruction) -> LocalBatch:
        key = each.step, each.batch
        if key not in self.batches:
            self.batches[key] = self._sharded(each.batch)
        return self.batches[key]

    def _sharded(self, number: int) -> LocalBatch:
        cp, truth = self.objects[0], self.truth
        starts = self.program.documents[number]
        if self.program.style == "shard_batch":
            batch = cp.shard_batch(
                input_ids=truth.ids(number),
                labels=truth.labels(number),
                cu_seqlens=starts,
                also=self.objects[1:],
            )
            handle = batch.documents
            assert batch.input_ids is not None
            assert batch.labels is not None
            positions = cp.positions(documents=handle)
            return LocalBatch(number, positions, batch.input_ids, batch.labels, handle)
        handle = None
        if self.program.style == "documents":
            handle = cp.documents(starts, also=self.objects[1:])
        ids = cp.shard(truth.ids(number), 1, documents=handle)
        targets = cp.shard(truth.targets(number), 1, documents=handle)
        targets = targets.masked_fill(cp.padding(documents=handle), IGNORED)
        return LocalBatch(number, cp.positions(documents=handle), ids, targets, handle)

    # Calls.

    def _object(self, layer: int) -> ContextParallel:
        return self.objects[1 if layer in self.program.windowed else 0]

    def _attend(self, each: Instruction) -> dict[str, tuple[float, float]]:
        batch, label = self._batch(each), self.truth.label(each)
        leaves = self.truth.qkv(each.layer, batch.ids)
        if each.change == "dtype":
            other = {torch.float64: torch.float32, torch.float32: torch.float64}
            leaves = [x.to(other[x.dtype]) for x in leaves]
        elif each.change == "rows":
            leaves = [x[:1] for x in leaves] if len(batch.ids) > 1 else [*map(_twice, leaves)]
        leaves = [x.detach().requires_grad_(each.change != "no gradient") for x in leaves]
        cp = self._object(each.layer)
        options: dict[str, Any] = {"label": label}
        if each.kind is Kind.FUNCTION:
            tokens = self.program.documents[each.batch][-1]
            out = mesh_attention(*leaves, causal=True, seq_len=tokens, **options)
        else:
            options["documents"] = batch.documents
            if each.kind is Kind.CHECKPOINT:
                out = checkpoint(cp.attention, *leaves, use_reentrant=False, **options)
            else:
                out = cp.attention(*leaves, **options)
        assert isinstance(out, Tensor)
        if not each.change:
            self.made[each.step, each.layer] = Made(out, leaves, batch)
        rows = min(len(out), self.program.rows)
        truth = self.truth.attention(each.batch, each.layer).out[:rows]
        return {"out": self._distance(out.detach()[:rows], truth, batch)}

    def _backward(self, each: Instruction) -> dict[str, tuple[float, float]]:
        made = self.made.pop((each.step, each.layer), None)
        if made is None:
            return {}  # its forward call was never made
        grad_out = self._own_rows(self.truth.grad_out(made.batch.number, each.layer), made.batch)
        grads = torch.autograd.grad(made.out, made.leaves, grad_out)
        truth = self.truth.attention(made.batch.number, each.layer)
        wanted = {"grad_q": truth.grad_q, "grad_k": truth.grad_k, "grad_v": truth.grad_v}
        return {
            name: self._distance(grad, whole, made.batch)
            for grad, (name, whole) in zip(grads, wanted.items(), strict=True)
        }

    def _unshard(self, each: Instruction) -> dict[str, tuple[float, float]]:
        batch, cp = self._batch(each), self.objects[0]
        own = self.truth.qkv(0, batch.ids)[0]
        options = self._label_of(cp.unshard, each)
        whole = cp.unshard(own, 1, documents=batch.documents, **options)
        wanted = self.truth.qkv(0, self.truth.ids(each.batch))[0]
        return {"whole": (_largest(whole - wanted), 0.0)}

    def _loss(self, each: Instruction) -> dict[str, tuple[float, float]]:
        batch, cp = self._batch(each), self.objects[0]
        options = self._label_of(cp.cross_entropy, each)
        logits = self.truth.logits(batch.ids)
        mean = cp.cross_entropy(logits, batch.targets, reduce="sum", **options)
        losses, number = self.truth.losses(each.batch), self.truth.targets(each.batch) != IGNORED
        count = int(number.sum())
        own = self._own_rows(losses, batch).sum()
        return {
            "mean": (_largest(mean.value - losses.sum() / max(count, 1)), 1e-9),
            "loss": (_largest(mean.loss - own / max(count, 1)), 1e-9),
            "number of targets": (_largest(mean.num_targets.double() - count), 0.0),
        }

    def _label_of(self, call: Any, each: Instruction) -> dict[str, Any]:
        """Where the call takes one."""
        label = self.truth.label(each)
        takes = "label" in inspect.signature(call).parameters
        return {"label": label} if takes and label is not None else {}

    # Numbers.

    def _own_rows(self, whole: Tensor, batch: LocalBatch) -> Tensor:
        """Padding rows are NaN in nothing that is used, and 0 here."""
        tokens = whole.shape[1]
        own = whole[:, batch.positions.clamp(max=tokens - 1)]
        padding = (batch.positions >= tokens).view(1, -1, *[1] * (whole.ndim - 2))
        return own.masked_fill(padding, 0)

    def _distance(self, own: Tensor, whole: Tensor, batch: LocalBatch) -> tuple[float, float]:
        real = batch.positions < whole.shape[1]
        wanted = whole[:, batch.positions[real]]
        scale = max(1.0, whole.abs().max().item())
        return _largest(own[:, real].double() - wanted) / scale, ALLOWED[own.dtype]


def _twice(x: Tensor) -> Tensor:
    return torch.cat([x, x])


def _largest(x: Tensor) -> float:
    """NaN stays NaN, which is never small enough."""
    return x.detach().abs().max().item() if x.numel() else 0.0
