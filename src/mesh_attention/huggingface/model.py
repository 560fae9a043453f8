"""A Hugging Face model on ranks: one object for each kind of layer that it has, on one group.

Layers with a window and layers without share the tokens of a batch, so its layout is chosen for all
of them. What enters the model is checked at its door, where mistakes have names.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.distributed.device_mesh import DeviceMesh

from mesh_attention.api.context_parallel import ContextParallel
from mesh_attention.errors import MeshAttentionError
from mesh_attention.huggingface.attention import NAME, WITHOUT_BATCH, ModelBatch, register
from mesh_attention.huggingface.masks import LayerMask
from mesh_attention.huggingface.model_checks import (
    refuse_model,
    shifts_labels,
    transformers_model,
)
from mesh_attention.huggingface.models import SHOWN
from mesh_attention.huggingface.one_process import Generate, OneProcess
from mesh_attention.huggingface.token_mixers import refuse_token_mixers
from mesh_attention.huggingface.whole_outputs import WholeOutputs, fault_of_router, pools
from mesh_attention.request.attend import attend
from mesh_attention.request.position_checks import fault_of_positions
from mesh_attention.runtime.session.collective_call import collective_call, of_object
from mesh_attention.runtime.session.documents import Documents
from mesh_attention.train.means import Reduce
from mesh_attention.train.sharded_batch import ShardedBatch
from mesh_attention.train.whole_batch import MARK

Kind = tuple[LayerMask, float | None]  # of a layer, with its softcap


class ModelContextParallel(OneProcess):
    """A `ContextParallel` for all layers of a model, which then attends over the group.

        cp = ModelContextParallel(model, mesh["cp"])
        batch = cp.shard_batch(**whole)
        logits = model(**batch.model_inputs()).logits
        mean = cp.cross_entropy(logits, batch.labels, reduce="ddp")

    model     a transformers model for causal or masked language modelling, plain or with LoRA
              (peft), one that classifies tokens or sequences, or one without a head; give it before
              DDP or FSDP wrap it
    untested  take models that are not in the table of `docs/models.md`. Layers whose masks are
              others than causal or both directions, with a window or in chunks, are refused all the
              same, and so are modules that mix tokens outside of attention (convolutions, state-
              space layers) and types that are known to differ.
              The first `shard_batch` compares the model with one process, up to 2,048 tokens of its
              first row in both passes, and raises what differs: in time and memory a step of one
              process on so many tokens, once
    handled   names of classes of such modules that you make see the tokens of all ranks
    reduce    what averages gradients over the ranks, "ddp" or "fsdp"; "sum" if they are added up.
              For heads that classify sequences (rewards), whose `logits` are then those of whole
              rows on all ranks, and for `aux_loss`, which balances experts over the tokens of all
              ranks where `output_router_logits` asks for it
    options   as of `ContextParallel`, but for those that the model says: sizes and masks

    `generate` works on whole sequences at any time; `with cp.own_attention():` makes the model do
    so for a while, and `close()` for good.
    """

    def __init__(
        self,
        model: nn.Module,
        group_or_mesh: dist.ProcessGroup | DeviceMesh | None = None,
        *,
        untested: bool = False,
        handled: Collection[str] = (),
        reduce: Reduce | None = None,
        **options: Any,
    ) -> None:
        self.model = own = transformers_model(model)
        config = own.config.get_text_config()
        refuse_model(own, config, untested, reduce, options)
        refuse_token_mixers(own, handled)
        first, *rest = _kinds(own, config)
        sizes = {} if untested or getattr(own, "tp_size", None) else _heads(own, config)
        self._of_layers = options | sizes
        self._pools = pools(own)
        self._shifts_labels = shifts_labels(own)
        super().__init__(group_or_mesh, **self._of_layers, **_arguments(first))
        self._by_kind: dict[Kind, ContextParallel] = {first: self}
        self._door: _Door | None = None
        self._names = frozenset(inspect.signature(own.forward).parameters)
        self._uncompared = model if untested and config.model_type not in SHOWN else None
        try:
            for kind in rest:
                self._of(kind)
            self._door = _Door(own, self, reduce)
        except BaseException:
            self.close()
            raise

    def shard_batch(self, *, shift_labels: bool | None = None, **whole: Any) -> ShardedBatch:
        """As of `ContextParallel`; without `shift_labels`, labels are shifted for models that
        predict the next token, and for others they stay."""
        if self._pools and whole.get("labels") is not None:
            raise MeshAttentionError(
                "labels are those of rows here: keep them, and give them to a loss with "
                "model(**batch.model_inputs()).logits, which all ranks have of all rows"
            )
        shifts = self._shifts_labels if shift_labels is None else shift_labels
        return super().shard_batch(shift_labels=shifts, **whole)

    def attend_layer(
        self,
        tensors: tuple[Tensor, Tensor, Tensor],
        fault: MeshAttentionError | None,
        mask: LayerMask,
        softcap: float | None,
        **call: Any,
    ) -> Tensor:
        """Of a layer of the model; chunks are documents of the call."""
        kind = replace(mask, chunk=None), softcap or None
        cp = self if fault is not None else self._of(kind)
        return _attend(cp, tensors, fault, **call)

    def _of(self, kind: Kind) -> ContextParallel:
        """Kinds that the config did not say are made when a layer comes, on all ranks alike."""
        if kind not in self._by_kind:
            group = self._calls.session.groups.parent
            cp = ContextParallel(group, **self._of_layers, **_arguments(kind))
            self._by_kind[kind] = cp
            self._calls.companions.append(cp._calls)
        return self._by_kind[kind]

    def close(self) -> None:
        if self._door is not None:
            self._door.remove()
        for cp in list(self._by_kind.values())[1:]:
            cp.close()
        super().close()


@collective_call(of_object)
def _attend(
    cp: ContextParallel,
    tensors: tuple[Tensor, Tensor, Tensor],
    fault: MeshAttentionError | None,
    **call: Any,
) -> Tensor:
    out, _ = attend(cp._calls, *tensors, fault, **call)
    return out


def _kinds(model: nn.Module, config: Any) -> list[Kind]:
    """Of the layers, those without a window first; a forecast, on which only the choice of the
    layout depends."""
    window, types = _said(config, "sliding_window"), _said(config, "layer_types")
    softcap = _said(config, "attn_logit_softcapping")
    causal = not any(getattr(module, "is_causal", True) is False for module in model.modules())
    behind = None if not window else (window - 1, 0) if causal else (window, window)
    windows = (
        {behind} if types is None else {behind if "sliding" in name else None for name in types}
    )
    return [
        (LayerMask(causal, window), softcap)
        for window in sorted(windows, key=lambda window: (window is not None, window))
    ]


def _heads(model: nn.Module, config: Any) -> dict[str, int]:
    """Of all layers, where their projections are of the sizes that the config says; others (MLA,
    layers that differ) say their sizes by their tensors."""
    heads, hidden = _said(config, "num_attention_heads"), _said(config, "hidden_size")
    if not heads or not hidden:
        return {}
    kv_heads = _said(config, "num_key_value_heads") or heads
    head_dim = _said(config, "head_dim") or hidden // heads
    wanted = [heads * head_dim, kv_heads * head_dim, kv_heads * head_dim]
    projections = ("q_proj", "k_proj", "v_proj")
    sizes = [
        [getattr(getattr(module, name), "out_features", None) for name in projections]
        for module in model.modules()
        if all(hasattr(module, name) for name in projections)
    ]
    if not sizes or any(size != wanted for size in sizes):
        return {}
    return {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": head_dim}


def _said(config: Any, name: str) -> Any:
    try:
        return getattr(config, name, None)
    except RuntimeError:  # layers differ in it
        return None


def _arguments(kind: Kind) -> dict[str, Any]:
    mask, softcap = kind
    return {"causal": mask.causal, "window_size": mask.window, "softcap": softcap}


class _Door:
    """Looks at what enters the model, and sends the object in with the batch. Copies of the model
    share it."""

    def __init__(self, model: Any, cp: ModelContextParallel, reduce: Reduce | None) -> None:
        register()
        if any(isinstance(hook, _Door) for hook in model._forward_pre_hooks.values()):
            raise MeshAttentionError("the model has a ModelContextParallel already; close() it")
        self._model, self._cp, self._reduce = model, cp, reduce
        self._names = [*inspect.signature(model.forward).parameters]
        self.add()

    def add(self) -> None:
        self._before = self._model.config._attn_implementation
        self._model.set_attn_implementation(NAME)
        self._hook = self._model.register_forward_pre_hook(self, with_kwargs=True)
        reduce = self._reduce
        self._outputs = None if reduce is None else WholeOutputs(self._model, self._cp, reduce)
        if hasattr(self._model, "generate"):
            self._model.generate = Generate(self._model, self._cp)

    def remove(self) -> None:
        self._hook.remove()
        self._model.__dict__.pop("generate", None)
        if self._outputs is not None:
            self._outputs.remove()
        if self._model.config._attn_implementation == NAME:
            self._model.set_attn_implementation(self._before)

    def __call__(self, model: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        arguments = dict(zip(self._names, args, strict=False)) | kwargs
        if model.config._attn_implementation != NAME:
            raise MeshAttentionError(
                f"the attention of the model was set to {model.config._attn_implementation!r} "
                "meanwhile, which sees the tokens of this rank alone; close() the object first"
            )
        documents = arguments.get("documents")
        if documents is None:
            raise MeshAttentionError(WITHOUT_BATCH)
        for name, way_out in _AT_THE_DOOR.items():
            if _is_given(arguments, name):
                raise MeshAttentionError(f"{name} was given to the model: {way_out}")
        if arguments.get("output_router_logits"):
            fault = fault_of_router(model, self._reduce)
            if fault is not None:
                raise MeshAttentionError(f"output_router_logits was given to the model: {fault}")
        if arguments.get("position_ids") is None:
            raise MeshAttentionError(
                "position_ids were not given to the model, which would count this rank's tokens "
                "from 0: call it as model(**batch.model_inputs())"
            )
        position_ids = arguments["position_ids"]
        if isinstance(documents, Documents) and not is_dynamo_compiling():
            wrong, tensors = _fault_of_batch(documents, position_ids), (None, None, None)
            if wrong is not None:  # all ranks raise it
                self._cp.attend_layer(tensors, wrong, LayerMask(), None)  # type: ignore[arg-type]
        return args, kwargs | {"documents": ModelBatch(self._cp, documents, position_ids)}

    def __deepcopy__(self, memo: dict[int, Any]) -> _Door:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise MeshAttentionError(
            "a model on ranks holds a process group and cannot be pickled; save its state_dict, or "
            "close() the ModelContextParallel first"
        )


def _fault_of_batch(documents: Documents, position_ids: Tensor) -> MeshAttentionError | None:
    mark, batch = getattr(position_ids, MARK, None), documents.plans.batch
    if mark is None:  # not of shard_batch, so the host waits for them
        return fault_of_positions(documents.shards, "q", position_ids, documents.position_ids)
    if batch is None or mark == (batch.number, batch.contents):
        return None
    return MeshAttentionError(
        "documents are those of another batch than position_ids: call the model as "
        "model(**batch.model_inputs()), with all of one batch"
    )


_AT_THE_DOOR = {
    "labels": "models shift labels, and those of shard_batch are targets already; take "
    "cp.cross_entropy(logits, batch.labels, ...)",
    "attention_mask": "shard_batch reads it, and makes documents of it",
    "past_key_values": "caches of earlier tokens are not supported over ranks",
    "output_attentions": "attention weights are never made",
    "logits_to_keep": "the last tokens of a rank are not the last of the sequence; use "
    "cp.unshard(logits, 1, documents=batch.documents)",
}


def _is_given(arguments: dict[str, Any], name: str) -> bool:
    value = arguments.get(name)
    return isinstance(value, Tensor) or (value is not None and value is not False and value != 0)
