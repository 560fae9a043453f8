"""Masks of layers in code that `torch.compile` traces, which cannot look into functions: without a
guess each model would be compiled in three parts, cut where its masks are made.

The guess is made of what transformers hand over beside the function, and is taken only where this
version of transformers makes all its masks so: that is tried once, by making some.
"""

from __future__ import annotations

import inspect
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AttentionMaskInterface, masking_utils

from mesh_attention.huggingface.masks import LayerMask, read_mask

_CHECK = "mesh_attention_check"
_MADE_BY = (
    "create_causal_mask",
    "create_sliding_window_causal_mask",
    "create_chunked_causal_mask",
    "create_bidirectional_mask",
    "create_bidirectional_sliding_window_mask",
)


def guess(
    config: Any = None,
    mask_function: Any = None,
    attention_mask: Any = None,
    use_vmap: bool = True,
    local_size: int | None = None,
    **others: Any,
) -> LayerMask | None:
    """None: it must be read. `use_vmap` says that the model adds functions of its own."""
    if attention_mask is not None or use_vmap or config is None:
        return None
    if mask_function is masking_utils.causal_mask_function:
        return LayerMask()
    if mask_function is masking_utils.bidirectional_mask_function:
        return LayerMask(causal=False)
    if mask_function.__qualname__ != "and_masks.<locals>.and_mask":
        return None
    if getattr(config, "attention_chunk_size", None) is not None:
        return None  # `local_size` may be that of chunks
    if "allow_is_bidirectional_skip" in others:
        return None if local_size is None else LayerMask(False, (local_size, local_size))
    return LayerMask(window=None if local_size is None else (local_size - 1, 0))


@lru_cache(maxsize=1)
def guesses_are_right() -> bool:
    """Of masks as this version makes them, for one document and for packed ones."""
    AttentionMaskInterface.register(
        _CHECK, lambda **arguments: (guess(**arguments), read_mask(**arguments))
    )
    try:
        for make in filter(None, (getattr(masking_utils, name, None) for name in _MADE_BY)):
            for positions in ([0, 1, 2], [0, 1, 0]):
                guessed, true = _made(make, positions)
                if true.refused is not None or guessed not in (None, true):
                    return False
    except Exception:  # of another version, whatever it is: then masks are read
        return False
    return True


def _made(make: Any, positions: list[int]) -> Any:
    chunk = 5 if "chunked" in make.__name__ else None
    hidden = torch.zeros(1, len(positions), 1, device="cpu")
    arguments = {
        "config": SimpleNamespace(
            _attn_implementation=_CHECK, sliding_window=4, attention_chunk_size=chunk
        ),
        "inputs_embeds": hidden,
        "input_embeds": hidden,
        "attention_mask": None,
        "cache_position": torch.arange(len(positions), device="cpu"),
        "past_key_values": None,
        "position_ids": torch.tensor([positions], device="cpu"),
    }
    known = inspect.signature(make).parameters
    return make(**{name: x for name, x in arguments.items() if name in known})
