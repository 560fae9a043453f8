"""Models that mix tokens outside of attention are refused by name, and no others.

Whether a model does is asked of it: attention is replaced by one that mixes nothing, one token is
changed, and the logits of all others are looked at.
"""

from __future__ import annotations

from typing import Any

import pytest

from support.pool import WorkerPool
from support.sample import sample

# By type: what is named.
MIXING = {
    "qwen3_next": "Qwen3NextGatedDeltaNet (convolves)",
    "qwen3_5_text": "Qwen3_5GatedDeltaNet (convolves)",
    "qwen3_5_moe_text": "Qwen3_5MoeGatedDeltaNet (convolves)",
    "kimi_linear": "KimiLinearDeltaAttention (convolves)",
    "falcon_h1": "FalconH1Mixer (convolves)",
    "bamba": "BambaMixer (convolves)",
    "minimax": "MiniMaxLightningAttention (by its name)",
    "olmo_hybrid": "OlmoHybridGatedDeltaNet (convolves)",
    "recurrent_gemma": "RecurrentGemmaRglru (by its name)",
}


def told_of(model: Any, **options: Any) -> str:
    from mesh_attention import MeshAttentionError
    from mesh_attention.huggingface import ModelContextParallel

    try:
        ModelContextParallel(model, **options).close()
    except MeshAttentionError as error:
        return str(error)
    return "nothing"


def mixing(rank: int, world_size: int, names: list[str]) -> dict[str, tuple[bool, str]]:
    from support.mixing_models import mixes_tokens, tiny_model

    results = {}
    for name in names:
        model = tiny_model(name)
        results[name] = mixes_tokens(model), told_of(model, untested=True)
    return results


@pytest.mark.parametrize("names", sample([[*MIXING][::2], [*MIXING][1::2]], 2), ids=" ".join)
def test_models_that_mix_tokens_outside_of_attention_are_refused_by_name(
    model_pool: WorkerPool, names: list[str]
) -> None:
    [results] = model_pool.run(mixing, 1, names)
    assert [*results] == names
    for name, (mixes, message) in results.items():
        assert mixes
        assert "mixes tokens outside of attention" in message
        assert MIXING[name] in message, message


def taken(rank: int, world_size: int) -> dict[str, Any]:
    from torch import nn

    from support.tiny_models import CONFIGS, make_model

    results: dict[str, Any] = {"known": [told_of(make_model(name)) for name in CONFIGS]}
    model = make_model("llama")
    model.model.layers[1].convolution = nn.Conv1d(4, 4, 3)
    model.lstm = nn.LSTM(4, 4)
    layer = type(model.model.layers[1]).__name__
    results["own"] = told_of(model)
    results["handled"] = told_of(model, handled=(layer, "LSTM"))
    results["half"] = told_of(model, handled=[layer])
    results["text"] = told_of(model, handled="LSTM")
    model.model.layers[1].convolution = nn.Conv1d(4, 4, 1)  # of each token by itself
    model.lstm = nn.Identity()
    results["pointwise"] = told_of(model)
    return results


def test_tested_models_and_modules_that_are_handled_are_taken(model_pool: WorkerPool) -> None:
    for results in model_pool.run(taken, 2):
        assert {*results["known"]} == {"nothing"}
        assert "LlamaDecoderLayer (convolves), LSTM (by its name)" in results["own"]
        assert "handled=['LlamaDecoderLayer', 'LSTM']" in results["own"]
        assert "alone: LSTM (by its name)" in results["half"]
        assert "the names of classes" in results["text"]
        assert results["handled"] == results["pointwise"] == "nothing"


@pytest.mark.slow
def test_of_all_types_those_that_mix_are_refused_and_no_others(model_pool: WorkerPool) -> None:
    [(asked, wrong)] = model_pool.run(all_types, 1, seconds=900.0)
    assert asked > 100
    assert wrong == []


def all_types(rank: int, world_size: int) -> tuple[int, list[str]]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    from support.mixing_models import mixes_tokens, tiny_model

    huge = ("blt", "phi4_multimodal", "git")  # whatever they are told
    asked, wrong = 0, []
    for name in sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - {*huge}):
        try:
            model = tiny_model(name)
            message = told_of(model, untested=True)
            mixes = mixes_tokens(model)
        except Exception:  # its config has other names, or wants other inputs
            continue
        asked += 1
        if message == "nothing" if mixes else "mixes tokens" in message:
            wrong.append(f"{name}: mixes is {mixes}, told {message}")
    return asked, wrong
