"""`LayerMask`: the mask of a layer of a Hugging Face model, read from the model's mask function.

Models combine mask functions of transformers. Supported are causal masks and masks of both
directions, with a window or in chunks. Documents that a model finds by the positions of this rank's
tokens are ignored: the documents of the batch count.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AttentionMaskInterface, masking_utils

from mesh_attention.errors import MeshAttentionError
from mesh_attention.runtime.session.modes import outside_compile


@dataclass(frozen=True)
class LayerMask:
    """Goes through the model in place of a mask tensor, to `attend` of `attention.py`.

    causal   a query sees no key after its own
    window   (left, right): that many keys before and after its own, as in `window_size`
    chunk    tokens of a chunk, counted from the start of a document; a query sees its own chunk
    refused  why the mask is not supported
    """

    causal: bool = True
    window: tuple[int, int] | None = None
    chunk: int | None = None
    refused: str | None = None

    def __getattr__(self, name: str) -> Any:
        raise MaskIsReadError(f".{name}")

    def __getitem__(self, index: Any) -> Any:
        parts = index if isinstance(index, tuple) else (index,)
        if all(part in (slice(None), slice(0, None)) for part in parts):
            return self  # the whole mask, as in Gemma 4
        raise MaskIsReadError("[...]")


class MaskIsReadError(MeshAttentionError, AttributeError):
    """A layer reads its mask as a tensor. An AttributeError, so that `hasattr` gives False."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"a layer of the model reads its mask as a tensor (mask{what}), as those of Doge do: "
            "attention over ranks makes no such tensor, so this model cannot attend over ranks"
        )


@outside_compile
def read_mask(**arguments: Any) -> LayerMask:
    """The mask of a layer, from the arguments of a mask interface of transformers. Versions differ
    in them: a mask that lacks a needed argument is refused."""
    if arguments.get("attention_mask") is not None:
        return LayerMask(refused="attention_mask was given to the model: give it to shard_batch")
    function_of_mask = arguments.get("mask_function")
    if function_of_mask is None:
        return LayerMask(refused="this version of transformers says its masks in another way")
    parts = [*_parts(function_of_mask)]
    names = {name: None for name, _ in parts}  # in order
    others = [name for name in names if name not in _KNOWN]
    if others:
        return LayerMask(
            refused=f"the mask of the layer has {others[0]}, and may be causal or see both "
            "directions, with a window or in chunks"
        )
    sizes = {(name, _size(part, _KNOWN[name])) for name, part in parts if _KNOWN[name]}
    causal = "causal_mask_function" in names
    if len(sizes) > 1 or causal == ("bidirectional_mask_function" in names):
        return LayerMask(refused=f"the mask of the layer has {' and '.join(names)} at once")
    name, size = sizes.pop() if sizes else ("", 0)
    if name == "sliding_window_bidirectional_overlay":
        return LayerMask(causal, (size, 0 if causal else size))
    if name and not causal:
        return LayerMask(refused=f"the mask of the layer has {name}, and is not causal")
    if name == "sliding_window_overlay":
        return LayerMask(window=(size - 1, 0))  # it counts a query's own key
    return LayerMask(causal, chunk=size or None)


# The functions that masks combine, each with the variable that holds its size.
_KNOWN: dict[str, str] = {
    "causal_mask_function": "",
    "bidirectional_mask_function": "",
    "packed_sequence_mask_function": "",
    "sliding_window_overlay": "sliding_window",
    "sliding_window_bidirectional_overlay": "sliding_window",
    "chunked_overlay": "chunk_size",
}


def _size(function: Callable[..., Any], name: str) -> int:
    return int(inspect.getclosurevars(function).nonlocals[name])


def _parts(function: Callable[..., Any]) -> Iterator[tuple[str, Callable[..., Any]]]:
    """The functions that a mask combines by `and`: (name of the function that made it,
    function)."""
    name = getattr(function, "__qualname__", repr(function)).partition(".")[0]
    if getattr(function, "__module__", None) != "transformers.masking_utils":
        yield f"{name}, which is not one of transformers", function
    elif name == "and_masks":
        for part in inspect.getclosurevars(function).nonlocals["mask_functions"]:
            yield from _parts(part)
    elif name == "remap_positions_for_packed_sequence":  # since 5.23: a mask inside documents
        yield from _parts(inspect.getclosurevars(function).nonlocals["mask_function"])
    else:
        yield name, function


# `torch.compile` cannot look into functions, and would break the graph where masks are made. So
# compiled code guesses a mask from the other arguments, if the guesses are right for all masks of
# this version of transformers: that is tried once.

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
    """The mask by the arguments of a mask interface but the function; None if it must be read.
    `use_vmap` says that the model adds functions of its own."""
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
    """Tries all masks that transformers makes, for one document and for packed documents."""
    AttentionMaskInterface.register(
        _CHECK, lambda **arguments: (guess(**arguments), read_mask(**arguments))
    )
    try:
        for make in filter(None, (getattr(masking_utils, name, None) for name in _MADE_BY)):
            for positions in ([0, 1, 2], [0, 1, 0]):
                guessed, true = _made(make, positions)
                if true.refused is not None or guessed not in (None, true):
                    return False
    except Exception:  # any, of another version: then masks are read
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
