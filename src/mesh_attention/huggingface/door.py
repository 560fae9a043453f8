"""What stands around a model on ranks: its door, where mistakes have names and the object is sent
in with the batch, and `generate`, for which the model attends to whole sequences."""

from __future__ import annotations

import inspect
from functools import update_wrapper
from typing import Any

from torch import Tensor
from torch.compiler import is_dynamo_compiling

from mesh_attention.errors import MeshAttentionError
from mesh_attention.huggingface.attention import NAME, WITHOUT_BATCH, ModelBatch, register
from mesh_attention.huggingface.masks import LayerMask
from mesh_attention.huggingface.whole_outputs import WholeOutputs, fault_of_router
from mesh_attention.request.port_checks import fault_of_positions
from mesh_attention.runtime.session.documents import Documents
from mesh_attention.train.means import Reduce
from mesh_attention.train.whole_batch import MARK


class Door:
    """Looks at what enters the model, and sends the object in with the batch. Copies of the model
    share it."""

    def __init__(self, model: Any, cp: Any, reduce: Reduce | None) -> None:
        register()
        if any(isinstance(hook, Door) for hook in model._forward_pre_hooks.values()):
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
                self._cp.attend_layer(tensors, wrong, LayerMask(), None)
        return args, kwargs | {"documents": ModelBatch(self._cp, documents, position_ids)}

    def __deepcopy__(self, memo: dict[int, Any]) -> Door:
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


class Generate:
    """`model.generate` on whole sequences, the same on all ranks that share parameters."""

    def __init__(self, model: Any, cp: Any) -> None:
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
