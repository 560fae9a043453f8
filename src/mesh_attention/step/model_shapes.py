"""Shapes of models: a small table of well-known ones, or a `config.json` of Hugging Face.

Attention alone takes the heads of any of them. Whole steps are planned for dense decoders of the
usual block (RMSNorm, attention, RMSNorm, SwiGLU): experts and layers with windows are refused.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mesh_attention.errors import PlanError, did_you_mean
from mesh_attention.files import read_text
from mesh_attention.plan.problem.arguments import flag, number


@dataclass(frozen=True, slots=True)
class ModelShape:
    """`tied`: the embedding is the head too. `qk_norm`: queries and keys are normalised, and what
    goes into that is kept. Without `layers` the blocks are not dense, and only the heads are known.
    Norms, a ten-thousandth of the parameters, are not counted."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: int = 0
    hidden: int = 0
    intermediate: int = 0
    vocabulary: int = 0
    tied: bool = False
    qk_norm: bool = False
    v_head_dim: int | None = None

    @property
    def heads(self) -> dict[str, Any]:
        """As `Problem` takes them."""
        return {
            n: getattr(self, n) for n in ("num_heads", "num_kv_heads", "head_dim", "v_head_dim")
        }

    @property
    def q_width(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def mlp_parameters(self) -> int:
        return 3 * self.hidden * self.intermediate

    @property
    def block_parameters(self) -> int:
        return 2 * self.hidden * (self.q_width + self.kv_width) + self.mlp_parameters

    @property
    def head_parameters(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def outer_parameters(self) -> int:
        """Of embedding and head."""
        return self.head_parameters * (1 if self.tied else 2)

    @property
    def parameters(self) -> int:
        return self.layers * self.block_parameters + self.outer_parameters


_QWEN3: dict[str, Any] = {"vocabulary": 151936, "qk_norm": True}
_TABLE = (
    ModelShape("llama-2-7b", 32, 32, 128, 32, 4096, 11008, 32000),
    ModelShape("llama-3.2-1b", 32, 8, 64, 16, 2048, 8192, 128256, tied=True),
    ModelShape("llama-3.1-8b", 32, 8, 128, 32, 4096, 14336, 128256),
    ModelShape("llama-3.1-70b", 64, 8, 128, 80, 8192, 28672, 128256),
    ModelShape("llama-3.1-405b", 128, 8, 128, 126, 16384, 53248, 128256),
    ModelShape("mistral-7b", 32, 8, 128, 32, 4096, 14336, 32768),  # version 0.3: no windows
    ModelShape("qwen3-0.6b", 16, 8, 128, 28, 1024, 3072, tied=True, **_QWEN3),
    ModelShape("qwen3-4b", 32, 8, 128, 36, 2560, 9728, tied=True, **_QWEN3),
    ModelShape("qwen3-8b", 32, 8, 128, 36, 4096, 12288, **_QWEN3),
    ModelShape("qwen3-14b", 40, 8, 128, 40, 5120, 17408, **_QWEN3),
    ModelShape("qwen3-32b", 64, 8, 128, 64, 5120, 25600, **_QWEN3),
    ModelShape("qwen3-235b", 64, 4, 128),
    ModelShape("mixtral-8x22b", 48, 8, 128),
    ModelShape("gpt-oss-120b", 64, 8, 64),
    # MLA, as it trains: keys and values for each head
    ModelShape("deepseek-v3", 128, 128, 192, v_head_dim=128),
)
MODELS = {model.name: model for model in _TABLE}
_SHORT_NAMES = {f"llama-{size}": f"llama-3.1-{size}" for size in ("8b", "70b", "405b")}
_SHORT_NAMES["llama2-7b"] = "llama-2-7b"
_KINDS = ("llama", "mistral", "qwen2", "qwen3")  # `model_type`s with the usual block


def model_shape(name: str) -> ModelShape:
    """Of a name or of the path of a `config.json`.

    >>> model_shape("qwen3-8b").parameters
    8190427136
    """
    name = _SHORT_NAMES.get(name, name)
    if name in MODELS:
        return MODELS[name]
    if name.endswith(".json"):
        return _of_config(name)
    hint, known = did_you_mean(name, [*MODELS, *_SHORT_NAMES]), ", ".join(MODELS)
    raise PlanError(f"{name[:99]!r} is not a model{hint}; known: {known}, or a path/config.json")


def _of_config(path: str) -> ModelShape:
    try:
        config = json.loads(read_text(path, most_bytes=1 << 20))
    except (json.JSONDecodeError, RecursionError) as error:
        raise PlanError(f"{path} is not JSON: {error}") from error
    kind = config.get("model_type") if isinstance(config, dict) else None
    if kind not in _KINDS:
        raise PlanError(
            f"{path}: model_type {kind!r} is not known, but {', '.join(_KINDS)} are; attention "
            "alone is planned for any num_heads, num_kv_heads and head_dim"
        )
    windows = config.get("sliding_window") is not None and config.get("use_sliding_window", True)
    if windows or {*(config.get("layer_types") or ())} - {"full_attention"}:
        raise PlanError(
            f"{path}: layers with windows (sliding_window, layer_types) are not planned"
        )

    def size(key: str, default: int | None = None) -> int:
        value = default if config.get(key) is None else config[key]
        if value is None:
            raise PlanError(f"{path} has no {key!r}")
        return number(f"{path}: {key}", value)

    heads, hidden = size("num_attention_heads"), size("hidden_size")
    return ModelShape(
        Path(path).parent.name or path,
        heads,
        size("num_key_value_heads", heads),
        size("head_dim", hidden // heads),
        size("num_hidden_layers"),
        hidden,
        size("intermediate_size"),
        size("vocab_size"),
        tied=flag(f"{path}: tie_word_embeddings", config.get("tie_word_embeddings", False)),
        qk_norm=kind == "qwen3",
    )
