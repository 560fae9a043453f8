"""A model on ranks that works on whole sequences for a while, as it did on one process: to
generate, and to be compared with. Models that nobody has shown to be exact are compared by
themselves, on their first batch."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import update_wrapper
from typing import Any, Protocol
from warnings import warn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.functional import cross_entropy

from mesh_attention.api.context_parallel import ContextParallel
from mesh_attention.diagnose.doctor import diagnose
from mesh_attention.diagnose.runs import Step
from mesh_attention.errors import MeshAttentionError
from mesh_attention.train.means import TokenMean
from mesh_attention.train.sharded_batch import ShardedBatch
from mesh_attention.train.whole_batch import MARK

_COMPARED = 2048  # tokens of the first batch of a model that is untested


class Door(Protocol):
    def add(self) -> None: ...

    def remove(self) -> None: ...


class OneProcess(ContextParallel):
    """What a `ModelContextParallel` can do besides. `_uncompared`: the model, as it was given,
    until it has been compared."""

    _door: Door | None
    _names: frozenset[str]  # that the model's forward takes
    _pools: bool  # its outputs are those of rows
    _uncompared: nn.Module | None

    @contextmanager
    def own_attention(self) -> Iterator[None]:
        """Inside, the model attends to whole sequences by itself; `generate` does so by itself."""
        door, self._door = self._door, None
        if door is None:
            yield
            return
        door.remove()
        try:
            yield
        finally:
            door.add()
            self._door = door

    def shard_batch(self, **batch: Any) -> ShardedBatch:
        """As of `ContextParallel`. Other tensors go to the model only if it names them; what
        collators of transformers say to flash-attn are documents."""
        of_collator = {name: batch.pop(name, None) for name in _OF_FLASH_ATTENTION}
        if of_collator["cu_seq_lens_q"] is not None:
            batch["cu_seqlens"] = of_collator["cu_seq_lens_q"]
        model, self._uncompared = self._uncompared, None
        if model is not None:
            _compare(self, model, batch)
        return replace(super().shard_batch(**batch), of_model=self._names)

    def plain_step(self) -> Step:
        """For `doctor`, which asks for it before it compares the model."""
        self._uncompared = None
        return lambda model, whole: self.plain_loss(model, self.shard_batch(**whole), whole)

    def plain_loss(
        self, model: Any, part: ShardedBatch, whole: Any, router: float = 0.0, **loss: Any
    ) -> Tensor:
        """Of a whole batch by the model's own attention. `part` is that of one rank, so it is all;
        rows that became one pack are rows again."""
        size = next(x for n in _INPUTS if (x := whole.get(n)) is not None).shape[:2]
        inputs = {n: x for n, x in part.model_inputs().items() if n != "documents"}
        inputs = {name: x.reshape(*size, *x.shape[2:]) for name, x in inputs.items()}
        if whole.get("attention_mask") is not None:
            inputs["attention_mask"] = whole["attention_mask"].to(part.position_ids.device)
        with self.own_attention():
            outputs = model(**inputs, use_cache=False)
        logits = outputs.logits.flatten(0, 1)
        wide = logits if logits.element_size() >= 4 else logits.float()
        assert part.labels is not None
        mean = cross_entropy(wide, part.labels.flatten(), **loss)
        return mean + router * outputs.aux_loss if router else mean


_INPUTS = ("input_ids", "inputs_embeds")
_OF_FLASH_ATTENTION = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


def _compare(cp: OneProcess, model: nn.Module, batch: Mapping[str, Any]) -> None:
    """The first row, cut short and as one document, whatever the batch makes of it: forward and
    backward pass on ranks and on this process."""
    name = next((n for n in _INPUTS if isinstance(batch.get(n), Tensor)), None)
    is_fsdp = isinstance(model, FSDPModule)
    below = any(isinstance(x, FSDPModule) for x in model.modules())
    if name is None or cp._pools or (below and not is_fsdp):
        warn(
            f"untested=True: {type(model).__name__} is not compared with one process by itself, "
            "since its batches have no input_ids, its outputs are those of rows, or FSDP2 has "
            "parts of it alone; call mesh_attention.doctor",
            stacklevel=4,
        )
        return
    takes = inspect.signature(model.forward).parameters
    how = {"use_cache": False} if {"use_cache", "kwargs"} & {*takes} else {}

    def output(inputs: dict[str, Any]) -> Tensor:
        outputs = model(**inputs, **how)
        out: Tensor = outputs.logits if hasattr(outputs, "logits") else outputs.last_hidden_state
        wide = torch.promote_types(out.dtype, torch.float32)
        return out.to(wide).square().mean(-1)

    def step(model: Any, whole: dict[str, Tensor]) -> TokenMean:
        part = cp.shard_batch(**whole)
        reduce: Any = "fsdp" if is_fsdp else "sum"
        return cp.token_mean(
            output(part.model_inputs()), ~part.padding, reduce=reduce, documents=part.documents
        )

    def plain(model: Any, whole: dict[str, Tensor]) -> Tensor:
        with cp.own_attention():
            return output(whole).mean()

    group = cp._calls.session.groups.parent

    def add_up(model: nn.Module) -> None:
        for parameter in model.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad, group=group)

    first = batch[name][:1, :_COMPARED].to(next(model.parameters()).device)
    report = diagnose(step, {name: first}, model, [cp], group, plain, None if is_fsdp else add_up)
    if not report.is_right:
        raise MeshAttentionError(
            f"{type(model).__name__} is untested, and on ranks it is not the model that it is on "
            f"one process, by the first {first.shape[1]} tokens of this batch: {report}"
        )


class Generate:
    """`model.generate` on whole sequences, the same on all ranks that share parameters."""

    def __init__(self, model: Any, cp: OneProcess | None) -> None:
        self._model, self._cp = model, cp
        update_wrapper(self, type(model).generate)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if any(hasattr(x, MARK) for x in (*args, *kwargs.values())):
            raise MeshAttentionError("generate takes whole sequences, and this is a rank's part")
        if self._cp is None:  # of a copy of the model, whose door refuses it
            return type(self._model).generate(self._model, *args, **kwargs)
        with self._cp.own_attention():
            return type(self._model).generate(self._model, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Generate:
        return Generate(memo[id(self._model)], None)
