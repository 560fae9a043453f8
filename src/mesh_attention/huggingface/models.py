"""The models that are shown to have losses, logits and gradients of one process.

Tests take their models from this table, and `docs/huggingface.md` its own.
"""

from __future__ import annotations

SHOWN = {
    "llama": "Llama: causal",
    "qwen3": "Qwen3: causal, layers may have windows",
    "mistral": "Mistral: a window in all layers",
    "gemma2": "Gemma 2: softcap, windows in every other layer",
    "gemma3_text": "Gemma 3, text: windows in most layers, another RoPE in each kind",
    "gpt_oss": "gpt-oss: sinks, windows in every other layer, experts",
}
