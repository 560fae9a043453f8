"""Attention over ranks as transformers' `AttentionInterface` wants it: layers call `attend`.

Everything that a layer passes is used or refused by name. The object and the documents of the batch
come as one argument (`ModelBatch`), which models pass on to their layers, so a checkpoint that
attends again has it too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from transformers import AttentionInterface, AttentionMaskInterface

from mesh_attention.errors import MeshAttentionError
from mesh_attention.huggingface.masks import LayerMask, guess, guesses_are_right, read_mask
from mesh_attention.runtime.session.documents import Documents

NAME = "mesh_attention"


def register() -> None:
    """Make `attn_implementation="mesh_attention"` known to transformers; twice is fine.

    `ModelContextParallel` does it too, and sets the implementation of its model.
    """
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, layer_mask if guesses_are_right() else read_mask)


def layer_mask(**arguments: Any) -> LayerMask:
    """The mask interface: guesses in compiled code, where functions of masks cannot be read."""
    mask = guess(**arguments) if is_dynamo_compiling() else None
    return read_mask(**arguments) if mask is None else mask


@dataclass(frozen=True, eq=False)
class ModelBatch:
    """What goes through the model with a batch: the `ModelContextParallel`, documents and
    positions; also, made on demand, the documents cut into chunks of so many tokens."""

    cp: Any
    documents: Documents
    position_ids: Tensor
    of_chunks: dict[int, Documents] = field(default_factory=dict)

    def documents_of(self, mask: LayerMask) -> Documents:
        chunk = mask.chunk
        if chunk is None or not isinstance(self.documents, Documents):  # refused by the call
            return self.documents
        if chunk not in self.of_chunks:
            self.of_chunks[chunk] = self.documents.in_chunks(chunk)
        return self.of_chunks[chunk]


WITHOUT_BATCH = (
    "attention over ranks needs to know its batch: call the model that ModelContextParallel was "
    "given, as model(**batch.model_inputs()) with batch = cp.shard_batch(...). For whole sequences "
    "on one process call it in `with cp.own_attention():`; generate needs no block, and close() "
    "gives the model its own attention back for good"
)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    documents: Any = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The attention interface, which every layer calls. Tensors are (batch, heads, local tokens,
    head_dim); the result is (batch, local tokens, heads, head_dim), without attention weights."""
    if not isinstance(documents, ModelBatch):
        # Of this rank alone: others may not come, as where one rank generates.
        raise MeshAttentionError(
            f"{WITHOUT_BATCH}. If it was called so, its layers do not pass `documents` on (as "
            "those of StableLM and Nemotron in transformers 5.22), and it cannot attend over ranks"
        )
    mask = _mask_of(attention_mask)
    layer_is_causal = is_causal is not False and getattr(module, "is_causal", True) is not False
    refusal = mask.refused
    left = None if mask.window is None else mask.window[0]
    # Layers count a query's own key; in both directions some do not.
    windows = (None,) if left is None else (None, left + 1, left + mask.causal)
    if refusal is None and sliding_window not in windows:
        refusal = f"sliding_window={sliding_window} of the layer, and its mask has {mask.window}"
    elif refusal is None and dropout:
        refusal = (
            f"attention_dropout={dropout}: dropout of attention weights is not supported; set "
            "config.attention_dropout to 0 before the model is made"
        )
    elif refusal is None and mask.causal and not layer_is_causal:
        refusal = "the layer is not causal, its mask is"
    elif refusal is None and query.shape[2] != key.shape[2]:
        refusal = (
            f"{query.shape[2]} queries and {key.shape[2]} keys: neither caches of earlier tokens "
            "(past_key_values) nor cross-attention are supported"
        )
    refusal = refusal or _unknown(others)
    query = with_temperature(module, query, documents.position_ids)
    out = documents.cp.attend_layer(
        (query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)),
        None if refusal is None else MeshAttentionError(refusal),
        mask,
        softcap,
        documents=documents.documents_of(mask),
        sinks=getattr(module, "sinks", None) if s_aux is None else s_aux,
        softmax_scale=scaling,
        label=getattr(module, "layer_idx", None),
    )
    return out, None


def _mask_of(mask: Any) -> LayerMask:
    if isinstance(mask, LayerMask):
        return mask
    if mask is None:
        return LayerMask(refused="the model makes no mask for its layer that could be read")
    return LayerMask(
        refused="attention_mask is a tensor of queries by keys, which is not supported: give "
        "documents to shard_batch (cu_seqlens, position_ids or an attention_mask of 0 and 1)"
    )


def with_temperature(module: Any, query: Tensor, positions: Tensor) -> Tensor:
    """Llama 4 scales the queries of layers without RoPE by the number of their token. It counts
    tokens of this rank; here queries get the factor of their position."""
    if not getattr(module, "attn_temperature_tuning", False) or module.use_rope:
        return query

    def scales(at: Tensor) -> Tensor:
        floors = torch.floor((at.float() + 1.0) / module.floor_scale)
        scaled: Tensor = torch.log1p(floors) * module.attn_scale + 1.0
        return scaled

    places = torch.arange(query.shape[2], device=query.device)
    factor = scales(positions.to(query.device)) / scales(places)
    return (query * factor[:, None, :, None]).to(query.dtype)


# They change no numbers of attention.
_NEUTRAL = (
    *("position_ids", "cache_position", "use_cache", "num_items_in_batch", "output_hidden_states"),
    *("output_router_logits", "return_dict"),
)
_WAYS_OUT = {
    **dict.fromkeys(
        ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"),
        "documents are those of the batch: give cu_seqlens to shard_batch",
    ),
    "output_attentions": "attention weights are never made",
    "padding": "the model got the whole batch: give it **batch.model_inputs()",
    "num_targets": "the model got the whole batch: give it **batch.model_inputs()",
}


def _unknown(others: Mapping[str, Any]) -> str | None:
    for name, value in others.items():
        if name in _NEUTRAL or value is None or value is False:
            continue
        way_out = _WAYS_OUT.get(name, "it is not known what this would do; leave it out")
        return f"{name} is not supported: {way_out}"
    return None
