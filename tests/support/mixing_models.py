"""Tiny models of any type of transformers, and whether they mix tokens outside of attention."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForCausalLM,
)

TOKENS = 24
SMALL: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "intermediate_size"), 32),
    **dict.fromkeys(("ffn_dim", "dff", "n_inner", "encoder_ffn_dim", "decoder_ffn_dim"), 32),
    **dict.fromkeys(("lru_width", "mamba_num_heads", "attn_dim", "embedding_size"), 32),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 4),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "moe_latent_size"), 16),
    **dict.fromkeys(("head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "mamba_head_dim"), 8),
    **dict.fromkeys(("mamba_d_state", "ssm_state_size", "state_size", "index_head_dim"), 8),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_experts_per_tok"), 2),
    **dict.fromkeys(("linear_num_key_heads", "num_key_value_heads", "index_n_heads"), 2),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 64),
    "vocab_size": 61, "linear_num_value_heads": 4, "mamba_n_groups": 1,
    "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_ssm": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "is_decoder": True,
}  # fmt: skip
_OF_TYPES: dict[str, dict[str, Any]] = {
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
}


def tiny_model(name: str) -> Any:
    """Raises for what cannot be made tiny by these names."""
    usual = AutoConfig.for_model(name)
    if usual.get_text_config() is not usual:
        raise ValueError(f"{name} is for more than text")
    known = {x: value for x, value in SMALL.items() if hasattr(usual, x)}
    config = AutoConfig.for_model(name, **known | _OF_TYPES.get(name, {}))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def mixes_tokens(model: Any) -> bool:
    """Whether other tokens have other logits when one changes, by attention that gives each token
    its own value."""
    AttentionInterface.register("own value", _own_value)
    AttentionMaskInterface.register("own value", lambda *_, **__: None)
    model.set_attn_implementation("own value")
    ids = torch.arange(3, 3 + TOKENS)[None]
    changed = ids.clone()
    changed[0, 9] = 50
    inputs: dict[str, Any] = {"use_cache": False}
    if "position_ids" in inspect.signature(model.forward).parameters:
        inputs["position_ids"] = torch.arange(TOKENS)[None]
    with torch.no_grad():
        apart = (model(ids, **inputs).logits - model(changed, **inputs).logits).abs().amax(-1)[0]
    assert apart[9] > 1e-4
    apart[9] = 0
    return bool(apart.max() > 1e-6)


def _own_value(
    module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, None]:
    groups = query.shape[1] // value.shape[1]
    return value.repeat_interleave(groups, 1).transpose(1, 2).contiguous(), None
