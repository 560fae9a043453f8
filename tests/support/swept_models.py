"""A tiny model of any text type of transformers on ranks, beside the same model in one process.

What is true is each sequence by itself, with eager attention: no padding and no packing, in which
types differ. Sizes are small, and so are windows, chunks and whatever else depends on the place of
a token, so that it shows in two dozen tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy, pad
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
)
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from mesh_attention.errors import MeshAttentionError
from mesh_attention.huggingface import ModelContextParallel
from mesh_attention.huggingface.model_checks import DIFFERENT, SHOWN
from support.mixing_models import SMALL

HEADS = {
    "causal": AutoModelForCausalLM,
    "masked": AutoModelForMaskedLM,
    "sequence": AutoModelForSequenceClassification,
    "router": AutoModelForCausalLM,  # the loss that balances its experts
}
_SIZES: dict[str, Any] = SMALL | {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("sliding_window", "attention_chunk_size", "local_attention"), 5),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers", "n_group", "topk_group"), 1),
    **dict.fromkeys(("window_size", "max_window_layers", "decoder_sparse_step"), 1),
    **dict.fromkeys(("moe_layer_start_index", "moe_layer_interval", "n_shared_experts"), 1),
    **dict.fromkeys(("attention_dropout", "attention_probs_dropout_prob"), 0.0),
    **dict.fromkeys(("hidden_dropout_prob", "resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    **dict.fromkeys(("num_key_value_heads", "num_global_key_value_heads"), 2),
    **dict.fromkeys(("moe_topk", "moe_k", "top_k_experts", "moe_num_experts_per_tok"), 2),
    **dict.fromkeys(("moe_num_experts", "num_experts_per_token"), 2),
    "use_sliding_window": True,
    "initializer_range": 0.2,  # attention that is far from even
    **dict.fromkeys(("global_head_dim", "swa_head_dim", "v_head_dim", "swa_v_head_dim"), 8),
    **dict.fromkeys(("swa_num_attention_heads", "rotary_dim"), 4),
    "swa_num_key_value_heads": 2,
    "floor_scale": 4,  # of Llama 4's queries
    "original_max_position_embeddings": 8,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 61,
    "num_kv_shared_layers": 0,
    "num_mtp_layers": 0,
    "num_nextn_predict_layers": 0,
}
_SHARED = {  # keys and values of earlier layers, of the same kind
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
}
# What a type needs besides, mostly for sizes that must fit each other.
_OF_TYPES: dict[str, dict[str, Any]] = {
    "llama4_text": {"no_rope_layers": [1, 0], "interleave_moe_layer_step": 2},
    "zaya": {"num_experts_per_tok": 1},
    "flint": {"mlp_only_layers": [0]},
    "longcat_flash": {"head_dim": 8},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "minimax_m3_vl_text": {"layer_types": ["minimax_m3_sparse", "full_attention"]},
    "gemma3n_text": _SHARED,
    "gemma4_text": _SHARED | {"global_head_dim": 16, "enable_moe_block": True},
    "gemma4_unified_text": {"global_head_dim": 16},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
}


def swept_model(name: str, head: str, **changes: Any) -> Any:
    usual = AutoConfig.for_model(name)
    if usual.get_text_config() is not usual:
        raise ValueError(f"{name} is for more than text")
    known = {x: value for x, value in _SIZES.items() if _may_be_set(usual, x)}
    if hasattr(usual, "qk_rope_head_dim"):
        known.pop("head_dim", None)  # of the rotated part
        known["num_key_value_heads"] = known["num_attention_heads"]
    if head == "masked":
        known["is_decoder"] = False
    kinds = [*dict.fromkeys(getattr(usual, "layer_types", None) or ())]
    if {*kinds} <= {"full_attention", "sliding_attention"} and _may_be_set(usual, "sliding_window"):
        kinds = kinds and ["sliding_attention", "full_attention"]  # whatever is usual
    if kinds and _may_be_set(usual, "layer_types"):  # one of each, or two of one
        known["layer_types"] = kinds if len(kinds) > 1 else kinds * 2
        known["num_hidden_layers"] = len(known["layer_types"])
    blocks = [*dict.fromkeys(getattr(usual, "mlp_layer_types", None) or ())]
    if blocks:
        layers = known["num_hidden_layers"]
        known["mlp_layer_types"] = [*blocks[:1] * (layers - 1), blocks[-1]]
    config = AutoConfig.for_model(name, **known | _OF_TYPES.get(name, {}) | changes)
    torch.manual_seed(0)
    config._experts_implementation = "eager"  # others have no float64
    model: Any = HEADS[head].from_config(config, attn_implementation="eager")
    model = model.eval().double()
    if sum(parameter.numel() for parameter in model.parameters()) > 30_000_000:
        raise ValueError(f"{name} is not small")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def _may_be_set(config: Any, name: str) -> bool:
    name = config.attribute_map.get(name, name)
    own = getattr(type(config), name, None)
    try:
        known = hasattr(config, name)
    except RuntimeError:  # layers differ in it
        known = True
    return known and not (isinstance(own, property) and own.fset is None)


@dataclass(frozen=True)
class Sequences:
    """Of a batch: `spans` (row, first, last) of tokens in it."""

    shape: tuple[int, int]
    spans: tuple[tuple[int, int, int], ...]
    is_packed: bool

    @property
    def ids(self) -> Tensor:
        chance = torch.Generator().manual_seed(self.shape[1])
        return torch.randint(3, 61, self.shape, generator=chance)

    @property
    def real(self) -> Tensor:
        mask = torch.zeros(self.shape, dtype=torch.bool)
        for row, a, b in self.spans:
            mask[row, a:b] = True
        return mask

    def whole(self) -> dict[str, Any]:
        ids, real = self.ids, self.real
        whole: dict[str, Any] = {
            "input_ids": ids.masked_fill(~real, 0),
            "labels": ids.masked_fill(~real, -100),
        }
        if not self.is_packed:
            return whole | {"attention_mask": real.long()}
        starts = torch.tensor([a for _, a, b in self.spans for _ in range(a, b)])
        return whole | {"position_ids": (torch.arange(self.shape[1]) - starts)[None]}


PADDED = Sequences((3, 17), ((0, 0, 17), (1, 0, 11), (2, 5, 17)), is_packed=False)
PACKED = Sequences((1, 23), ((0, 0, 9), (0, 9, 10), (0, 10, 23)), is_packed=True)


def results(model: Any, loss: Tensor, logits: Tensor, value: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    named = model.named_parameters()
    grads = {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        for name, parameter in named
    }
    return {"loss": value.detach(), "logits": logits.detach(), **grads}


# Heads whose loss is not that of tokens, and what their models are called with.
_OTHER_LOSSES: dict[str, dict[str, Any]] = {
    "sequence": {},
    "router": {"output_router_logits": True},
}


def loss_of_rows(logits: Tensor) -> Tensor:
    return cross_entropy(logits, torch.arange(len(logits)) % logits.shape[-1])


def _options(model: Any, head: str) -> dict[str, Any]:
    """What a model is called with besides. Caches may change what is computed (Gemma 3n)."""
    caches = "use_cache" in inspect.signature(model.forward).parameters
    return _OTHER_LOSSES.get(head, {}) | ({"use_cache": False} if caches else {})


def by_itself(model: Any, batch: Sequences, head: str) -> dict[str, Tensor]:
    ids, more = batch.ids, _options(model, head)
    outs = [model(ids[row : row + 1, a:b], **more) for row, a, b in batch.spans]
    if head == "router":
        layers = zip(*(out.router_logits for out in outs), strict=True)
        routed = tuple(torch.cat(layer) for layer in layers)
        top_k = model.config.num_experts_per_tok
        logits = loss = load_balancing_loss_func(routed, routed[0].shape[-1], top_k)
    elif head == "sequence":
        logits = torch.cat([out.logits for out in outs])
        loss = loss_of_rows(logits)
    else:
        logits = torch.cat([out.logits[0] for out in outs])
        targets = [ids[row, a:b] for row, a, b in batch.spans]
        if head == "causal":
            targets = [pad(x[1:], (0, 1), value=-100) for x in targets]
        loss = cross_entropy(logits, torch.cat(targets))
    return results(model, loss, logits, loss)


def over_ranks(
    cp: ModelContextParallel, model: Any, batch: Sequences, head: str, group: Any
) -> dict[str, Tensor]:
    """Gradients are added up: `reduce="sum"`."""
    whole = batch.whole()
    if head in _OTHER_LOSSES:
        del whole["labels"]
        out = model(**cp.shard_batch(**whole).model_inputs(), **_options(model, head))
        logits = out.aux_loss if head == "router" else out.logits
        loss = value = logits if head == "router" else loss_of_rows(logits)
    else:
        part = cp.shard_batch(**whole)
        logits = model(**part.model_inputs(), **_options(model, head)).logits
        mean = cp.cross_entropy(logits, part.labels, reduce="sum")
        loss, value = mean.loss, mean.value
        logits = cp.unshard(logits.detach(), 1, documents=part.documents)[batch.real]
    result = results(model, loss, logits, value)
    for name in [*result][2:]:
        dist.all_reduce(result[name], group=group)
    return result


def worst(results: dict[str, Tensor], true: dict[str, Tensor]) -> tuple[float, str]:
    """The largest relative error, and of what. Gradients that are next to nothing beside all others
    are rounding."""
    assert results.keys() == true.keys()
    least = 1e-2 * max(x.abs().max().item() for x in [*true.values()][2:])
    errors = {}
    for name, x in true.items():
        scale = max(x.abs().max().item(), least if name not in ("loss", "logits") else 0.0)
        error = (results[name] - x).abs().max().item() / (scale or 1.0)
        errors[name] = error if error == error else float("inf")
    name = max(errors, key=errors.__getitem__)
    return errors[name], name


@contextmanager
def features(model: Any) -> Iterator[set[str]]:
    """Of the layers that attend meanwhile."""
    seen: set[str] = set()
    attend_layer = ModelContextParallel.attend_layer

    def watched(self: Any, tensors: Any, fault: Any, mask: Any, softcap: Any, **call: Any) -> Any:
        q, _, v = tensors
        said = {
            "windows": mask.window,
            "both directions": not mask.causal,
            "chunks": mask.chunk,
            "softcap": softcap,
            "sinks": call["sinks"] is not None,
            "MLA": q.shape[-1] != v.shape[-1],
        }
        seen.update(name for name, value in said.items() if value)
        return attend_layer(self, tensors, fault, mask, softcap, **call)

    with patch.object(ModelContextParallel, "attend_layer", watched):
        yield seen
    if any("Expert" in type(module).__name__ for module in model.modules()):
        seen.add("experts")


def examine(
    rank: int, world_size: int, name: str, head: str, sizes: tuple[int, ...] = (1, 2, 3, 4)
) -> dict[str, Any]:
    """What one type comes to on so many ranks; `world_size` is the largest of them."""
    groups = {size: dist.new_group([*range(size)]) for size in sizes}
    batches = {"padded": PADDED} if head == "sequence" else {"padded": PADDED, "packed": PACKED}
    try:
        model = swept_model(name, head)
        true = {kind: by_itself(model, batch, head) for kind, batch in batches.items()}
    except Exception as error:
        return {"result": "not made", "why": f"{type(error).__name__}: {error}"[:300]}
    errors: dict[str, tuple[float, str]] = {}
    options: dict[str, Any] = {"untested": name not in SHOWN, "reduce": "sum"}
    with features(model) as seen, patch.dict(DIFFERENT, clear=True):  # whether they still are
        for size, group in groups.items():
            fault: dict[str, Any] | None = None
            try:
                if rank < size:
                    with ModelContextParallel(model, group, **options) as cp:
                        for kind, batch in batches.items():
                            results = over_ranks(cp, model, batch, head, group)
                            errors[f"{kind} on {size}"] = worst(results, true[kind])
            except Exception as error:
                is_refused = isinstance(error, MeshAttentionError)
                why = str(error) if is_refused else f"{type(error).__name__}: {error}"
                result = "refused" if is_refused else "failed"
                fault = {"result": result, "why": why[:400], "ranks": size}
            faults: list[Any] = [None] * world_size
            dist.all_gather_object(faults, fault)  # ranks that had no part in it stop too
            for fault in faults:
                if fault is not None:
                    return dict(fault)
    return {"result": "compared", "errors": errors, "features": sorted(seen)}
