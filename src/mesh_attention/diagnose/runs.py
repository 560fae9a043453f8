"""Runs a step of training code without its optimizer, on ranks or on one process, for `doctor.py`.

A step inside `nothing_changed` leaves buffers, gradients and random numbers as before.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Never

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.modules.dropout import _DropoutNd

from mesh_attention.api.context_parallel import ContextParallel
from mesh_attention.diagnose.record import Recorder
from mesh_attention.errors import MeshAttentionError
from mesh_attention.runtime.session.sharding import Shards
from mesh_attention.train.means import TokenMean

Step = Callable[[Any, Any], Tensor | TokenMean]


@dataclass
class StepRun:
    """The results of a step.

    value    the loss of all ranks where the step gives it (`is_of_all`), otherwise of this rank
    grads    of each parameter, this rank's part where ranks hold parts
    apart    the same before `reduce_gradients`, if that reduces them
    shards   the layout in which the object cut the batch, and `targets` the labels that it made
    """

    record: Recorder
    value: float = 0.0
    is_of_all: bool = False
    grads: dict[str, Tensor | None] = field(default_factory=dict)
    apart: dict[str, Tensor | None] = field(default_factory=dict)
    shards: Shards | None = None
    targets: Tensor | None = None


def inner(model: nn.Module) -> nn.Module:
    """The model without DDP and torch.compile around it."""
    while True:
        inside = getattr(model, "_orig_mod", None)
        if inside is None and isinstance(model, nn.parallel.DistributedDataParallel):
            inside = model.module
        if inside is None:
            return model
        model = inside


def run(
    step: Step,
    model: nn.Module,
    batch: Any,
    record: Recorder,
    *,
    cp: ContextParallel | None = None,
    reduce_gradients: Callable[[Any], None] | None = None,
    seed: int = 0,
) -> StepRun:
    """Runs the step forward and backward, and records what its modules compute. `cp`: the object by
    which ranks run the step; without it one process does."""
    outcome = StepRun(record)
    own = inner(model)
    for parameter in own.parameters():
        parameter.grad = None
    for set_seed in (torch.manual_seed, random.seed, np.random.seed):
        set_seed(seed)
    with ExitStack() as held:
        held.enter_context(torch.compiler.set_stance("force_eager"))
        held.enter_context(_averaging(own) if cp is None else _watched(cp, outcome))
        held.enter_context(record)
        held.enter_context(record.of(own))
        result = step(model, batch)
        record.is_on = False
        if any(p.grad is not None for p in own.parameters()):
            raise MeshAttentionError("step calls backward: leave that out, doctor does it")
        loss = result.loss if isinstance(result, TokenMean) else result
        value = result.value if isinstance(result, TokenMean) else result
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise MeshAttentionError(
                "step returns no loss: give the tensor that backward is called on, or what "
                "cross_entropy of the object returns"
            )
        outcome.value, outcome.is_of_all = float(value.detach()), isinstance(result, TokenMean)
        if cp is None and outcome.is_of_all and outcome.value:
            loss = loss * (value.detach() / loss.detach())  # not scaled for other ranks
        loss.backward()  # type: ignore[no-untyped-call]
        if reduce_gradients is not None and cp is not None:
            outcome.apart = _grads(own)
            reduce_gradients(model)
    outcome.grads = _grads(own)
    for parameter in own.parameters():
        parameter.grad = None
    return outcome


def _grads(model: nn.Module) -> dict[str, Tensor | None]:
    grads: dict[str, Any] = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
    parts = {n: x.to_local() if isinstance(x, DTensor) else x for n, x in grads.items()}
    return {name: None if x is None else x.detach().clone() for name, x in parts.items()}


@contextmanager
def _averaging(model: nn.Module) -> Iterator[None]:
    """FSDP2 averages gradients: all processes run the whole batch, so the mean is that of each."""
    modules = [m for m in model.modules() if isinstance(m, FSDPModule)]
    groups: list[Any] = [m._get_fsdp_state()._fsdp_param_group for m in modules]
    factors = [(group, group.gradient_divide_factor) for group in groups if group is not None]
    for group, _ in factors:
        group.gradient_divide_factor = None
    try:
        yield
    finally:
        for group, factor in factors:
            group.gradient_divide_factor = factor


@contextmanager
def _watched(cp: ContextParallel, outcome: StepRun) -> Iterator[None]:
    """Records how the object cuts batches, or the layout that attention assumes if it cuts none."""
    calls: Any = cp._calls
    cut, shard_batch = calls.cut, cp.shard_batch

    def watched_cut(documents: Any) -> Shards:
        outcome.shards = cut(documents)
        return outcome.shards

    def watched_batch(*batches: Never, **arguments: Any) -> Any:
        batch = shard_batch(*batches, **arguments)
        outcome.targets = batch.labels
        return batch

    calls.cut, cp.shard_batch = watched_cut, watched_batch  # type: ignore[method-assign]
    try:
        yield
        if outcome.shards is None and (calls.fixed or calls.latest) is not None:
            taken = calls.source.first
            plan, starts = taken.plan, (0, taken.plan.problem.q_tokens)
            (queries, keys), both = plan.shards, (starts, starts)
            outcome.shards = Shards(queries, keys, plan.devices[taken.rank], taken.words, both)
    finally:
        del calls.cut, cp.shard_batch


_OF_ATTENTION = (
    *("seq_len", "num_heads", "head_dim", "causal", "num_kv_heads", "v_head_dim", "kv_seq_len"),
    *("mask", "window_size", "softmax_scale", "softcap", "differentiable_lse", "kernel"),
)


@contextmanager
def on_one_rank(objects: Sequence[ContextParallel]) -> Iterator[None]:
    """These objects attend, cut and take means as if there were one process."""
    group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    before = [(cp, cp._calls) for cp in objects]
    alone = []
    try:
        for cp, calls in before:
            arguments: dict[str, Any] = {n: calls.arguments.get(n) for n in _OF_ATTENTION}
            if calls.arguments.get("plan") is not None:
                problem = calls.source.first.plan.problem
                lengths = {"seq_len": problem.q_tokens, "kv_seq_len": problem.kv_tokens}
                arguments |= {**lengths, "mask": problem.mask}
            alone.append(ContextParallel(group, **arguments))
            cp._calls = alone[-1]._calls
        yield
    finally:
        for cp, calls in before:
            cp._calls = calls
        for cp in alone:
            cp.close()
        dist.destroy_process_group(group)


@contextmanager
def nothing_changed(model: nn.Module) -> Iterator[list[str]]:
    """Restores what steps change, and yields the names of modules whose dropout is off meanwhile. A
    recorder would miss dropout where a backward pass computes a checkpoint in another thread."""
    own = inner(model)
    grads = [(p, p.grad) for p in own.parameters()]
    buffers = [(b, b.clone()) for b in own.buffers()]
    versions = [_version(p) for p, _ in grads]
    python, numpy_state = random.getstate(), np.random.get_state()
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    drops = {n: m for n, m in own.named_modules() if isinstance(m, _DropoutNd) and m.training}
    for module in drops.values():
        module.training = False
    try:
        with torch.random.fork_rng(devices):
            yield [name for name, module in drops.items() if module.p]
        if versions != [_version(p) for p, _ in grads]:
            raise MeshAttentionError(
                "step changes parameters: leave optimizer.step() out of it; doctor calls backward"
            )
    finally:
        random.setstate(python)
        np.random.set_state(numpy_state)
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        for parameter, grad in grads:
            parameter.grad = grad
        for module in drops.values():
            module.training = True


def _version(parameter: Any) -> int:
    return int(getattr(parameter, "_local_tensor", parameter)._version)
