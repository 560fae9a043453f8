"""Shapes of attention in models whose configurations are public, so that nobody looks them up."""

from __future__ import annotations

from typing import NamedTuple


class Model(NamedTuple):
    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int | None = None


MODELS = {
    "llama-8b": Model(32, 8, 128),
    "llama-70b": Model(64, 8, 128),
    "llama-405b": Model(128, 8, 128),
    "llama2-7b": Model(32, 32, 128),
    "qwen3-8b": Model(32, 8, 128),
    "qwen3-32b": Model(64, 8, 128),
    "qwen3-235b": Model(64, 4, 128),
    "mistral-7b": Model(32, 8, 128),
    "mixtral-8x22b": Model(48, 8, 128),
    "gpt-oss-120b": Model(64, 8, 64),
    "deepseek-v3": Model(128, 128, 192, 128),  # MLA, as it trains: keys and values for each head
}
