"""A Hugging Face model on ranks: one object for each kind of layer that it has, on one group.

Layers with a window and layers without share the tokens of a batch, so its layout is chosen for all
of them. What enters the model is checked at its door, where mistakes have names.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Collection
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from mesh_attention.api.context_parallel import ContextParallel
from mesh_attention.errors import MeshAttentionError
from mesh_attention.huggingface.attention import NAME, WITHOUT_BATCH, ModelBatch, register
from mesh_attention.huggingface.models import SHOWN
from mesh_attention.huggingface.one_process import Generate, OneProcess
from mesh_attention.huggingface.token_mixers import refuse_token_mixers
from mesh_attention.request.attend import attend
from mesh_attention.request.position_checks import fault_of_positions
from mesh_attention.runtime.session.collective_call import collective_call, of_object
from mesh_attention.runtime.session.documents import Documents
from mesh_attention.train.whole_batch import MARK

Kind = tuple[int | None, float | None]  # window and softcap of a layer


class ModelContextParallel(OneProcess):
    """A `ContextParallel` for all layers of a model, which then attends over the group.

        cp = ModelContextParallel(model, mesh["cp"])
        batch = cp.shard_batch(**whole)
        logits = model(**batch.model_inputs()).logits
        mean = cp.cross_entropy(logits, batch.labels, reduce="ddp")

    model     a transformers model for causal language modelling, plain or with LoRA (peft), one
              that classifies tokens, or one without a head; give it before DDP or FSDP wrap it
    untested  take models that are not in the table of `docs/huggingface.md`. Layers whose masks are
              others than causal, with a window or without, are refused all the same, and so are
              modules that mix tokens outside of attention (convolutions, state-space layers).
              The first `shard_batch` compares the model with one process, up to 2,048 tokens of its
              first row in both passes, and raises what differs: in time and memory a step of one
              process on so many tokens, once
    handled   names of classes of such modules that you make see the tokens of all ranks
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
        **options: Any,
    ) -> None:
        self.model = own = _transformers_model(model)
        config = own.config.get_text_config()
        _refuse(own, config, untested, options)
        refuse_token_mixers(own, handled)
        first, *rest = _kinds(config)
        sizes = {} if untested or getattr(own, "tp_size", None) else _heads(config)
        self._of_layers = options | {"causal": True} | sizes
        super().__init__(group_or_mesh, **self._of_layers, **_arguments(first))
        self._by_kind: dict[Kind, ContextParallel] = {first: self}
        self._door: _Door | None = None
        self._names = frozenset(inspect.signature(own.forward).parameters)
        self._uncompared = model if untested and config.model_type not in SHOWN else None
        try:
            for kind in rest:
                self._of(kind)
            self._door = _Door(own, self)
        except BaseException:
            self.close()
            raise

    def attend_layer(
        self,
        tensors: tuple[Tensor, Tensor, Tensor],
        fault: MeshAttentionError | None,
        window: int | None,
        softcap: float | None,
        **call: Any,
    ) -> Tensor:
        """Of a layer of the model."""
        cp = self if fault is not None else self._of((window, softcap or None))
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


def _transformers_model(model: nn.Module) -> Any:
    base: Any = getattr(model, "get_base_model", None)  # of peft
    if base is not None:
        model = base()
    if not isinstance(model, PreTrainedModel):
        inside = getattr(model, "module", None)
        hint = ": give the model inside, before it is wrapped" if inside is not None else ""
        raise MeshAttentionError(
            f"the model is a {type(model).__name__}, which is no model of transformers{hint}"
        )
    return model


_SAID_BY_MODEL = (
    *("plan", "seq_len", "kv_seq_len", "num_heads", "num_kv_heads", "head_dim", "v_head_dim"),
    *("causal", "mask", "window_size", "softmax_scale", "softcap"),
)


def _refuse(model: Any, config: Any, untested: bool, options: dict[str, Any]) -> None:
    said = [name for name in _SAID_BY_MODEL if options.get(name) is not None]
    if said:
        raise MeshAttentionError(f"{', '.join(said)}: the model says this; leave it out")
    _refuse_head(model)
    if config.model_type not in SHOWN and not untested:
        raise MeshAttentionError(
            f"models of type {config.model_type!r} have not been shown to be exact; known: "
            f"{', '.join(SHOWN)}. With untested=True it is taken: compare its loss with that of "
            "one process"
        )
    if not model._supports_attention_backend and not any(
        hasattr(sys.modules[type(part).__module__], "ALL_ATTENTION_FUNCTIONS")
        for part in model.modules()
    ):
        raise MeshAttentionError(
            f"{type(model).__name__} does not use AttentionInterface in this version of "
            "transformers, so its layers would see the tokens of this rank alone"
        )
    if getattr(config, "output_router_logits", False):
        raise MeshAttentionError(
            "output_router_logits=True: the loss that balances experts would be that of this "
            "rank's tokens alone; set config.output_router_logits to False"
        )
    if getattr(config, "output_attentions", False):
        raise MeshAttentionError("output_attentions=True: attention weights are never made")
    for module in model.modules():
        rope_types = getattr(module, "rope_type", None)  # or one for each kind of layer
        for name in rope_types.values() if isinstance(rope_types, dict) else [rope_types]:
            if isinstance(name, str) and ("dynamic" in name or name == "longrope"):
                raise MeshAttentionError(
                    f"rope_type={name!r} depends on the longest sequence of a batch, and a rank "
                    "knows its own tokens alone; take yarn, linear or llama3 scaling"
                )


def _refuse_head(model: Any) -> None:
    """Heads that read one token, or all, would read those of this rank."""
    known = ("ForCausalLM", "ForTokenClassification", "Model")
    other = ("PreTrainedModel", "DoubleHeadsModel")
    names = [base.__name__ for base in type(model).__mro__]
    if not any(name.endswith(known) and not name.endswith(other) for name in names):
        raise MeshAttentionError(
            f"{names[0]} has a head that may take the tokens of this rank for the whole sequence, "
            "as where it reads the last one; supported: ...ForCausalLM, ...ForTokenClassification "
            "and models without a head (...Model). Take the last, and call the head on what "
            "cp.unshard(hidden, 1, documents=batch.documents, grad='sum') gives under DDP"
        )


def _kinds(config: Any) -> list[Kind]:
    """Of the layers, those without a window first; a forecast, on which only the choice of the
    layout depends."""
    window, types = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    softcap = getattr(config, "attn_logit_softcapping", None)
    windows = (
        {window} if types is None else {None if x == "full_attention" else window for x in types}
    )
    return [(x, softcap) for x in sorted(windows, key=lambda x: (x is not None, x))]


def _heads(config: Any) -> dict[str, int]:
    heads = config.num_attention_heads
    return {
        "num_heads": heads,
        "num_kv_heads": getattr(config, "num_key_value_heads", None) or heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // heads,
    }


def _arguments(kind: Kind) -> dict[str, Any]:
    """Transformers count a query's own key in its window."""
    window, softcap = kind
    return {"window_size": None if window is None else (window - 1, 0), "softcap": softcap}


class _Door:
    """Looks at what enters the model, and sends the object in with the batch. Copies of the model
    share it."""

    def __init__(self, model: Any, cp: ModelContextParallel) -> None:
        register()
        if any(isinstance(hook, _Door) for hook in model._forward_pre_hooks.values()):
            raise MeshAttentionError("the model has a ModelContextParallel already; close() it")
        self._model, self._cp = model, cp
        self._names = [*inspect.signature(model.forward).parameters]
        self.add()

    def add(self) -> None:
        self._before = self._model.config._attn_implementation
        self._model.set_attn_implementation(NAME)
        self._hook = self._model.register_forward_pre_hook(self, with_kwargs=True)
        if hasattr(self._model, "generate"):
            self._model.generate = Generate(self._model, self._cp)

    def remove(self) -> None:
        self._hook.remove()
        self._model.__dict__.pop("generate", None)
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
        if arguments.get("position_ids") is None:
            raise MeshAttentionError(
                "position_ids were not given to the model, which would count this rank's tokens "
                "from 0: call it as model(**batch.model_inputs())"
            )
        position_ids, is_compiled = arguments["position_ids"], is_dynamo_compiling()
        if isinstance(documents, Documents) and not (is_compiled or hasattr(position_ids, MARK)):
            # Not those of shard_batch, so the host waits for them. All ranks raise what is wrong.
            fault = fault_of_positions(documents.shards, "q", position_ids, documents.position_ids)
            nothing: Any = None
            if fault is not None:
                self._cp.attend_layer((nothing, nothing, nothing), fault, None, None)
        return args, kwargs | {"documents": ModelBatch(self._cp, documents)}

    def __deepcopy__(self, memo: dict[int, Any]) -> _Door:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise MeshAttentionError(
            "a model on ranks holds a process group and cannot be pickled; save its state_dict, or "
            "close() the ModelContextParallel first"
        )


_AT_THE_DOOR = {
    "labels": "models shift labels, and those of shard_batch are targets already; take "
    "cp.cross_entropy(logits, batch.labels, ...)",
    "attention_mask": "shard_batch reads it, and makes documents of it",
    "past_key_values": "caches of earlier tokens are not supported over ranks",
    "output_attentions": "attention weights are never made",
    "output_router_logits": "what balances experts would be that of this rank's tokens alone",
    "logits_to_keep": "the last tokens of a rank are not the last of the sequence; use "
    "cp.unshard(logits, 1, documents=batch.documents)",
}


def _is_given(arguments: dict[str, Any], name: str) -> bool:
    value = arguments.get(name)
    return isinstance(value, Tensor) or (value is not None and value is not False and value != 0)
