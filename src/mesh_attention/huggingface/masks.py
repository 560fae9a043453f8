"""What a layer of a Hugging Face model sees, read from the mask function that the model makes.

Models say their masks as functions of indices, put together from a few that transformers has. No
tensor is made of them here: causal or both directions, with a window or in chunks, is all that they
may say. Documents and padding are those of the batch, so what the model concludes about documents
from the positions of this rank's tokens is left out.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from mesh_attention.errors import MeshAttentionError
from mesh_attention.runtime.session.modes import outside_compile


@dataclass(frozen=True)
class LayerMask:
    """Goes through the model in place of a mask.

    causal   a query sees no key after its own
    window   (left, right): that many keys before and after its own, as `window_size` says it
    chunk    a query sees keys of its own chunk alone, counted from the start of its document
    refused  why the mask is another one
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
            return self  # all of it: Gemma 4 cuts off no token
        raise MaskIsReadError("[...]")


class MaskIsReadError(MeshAttentionError, AttributeError):
    """By a layer, which then does something with it that is not known here. To those who only look
    whether something is there, it is not."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"a layer of the model reads its mask as a tensor (mask{what}), as those of Doge do: "
            "attention over ranks makes no such tensor, so this model cannot attend over ranks"
        )


@outside_compile
def read_mask(**arguments: Any) -> LayerMask:
    """From the arguments of a mask of transformers. They differ between versions, so they are asked
    for by name, and what is not there is refused."""
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


# Of which masks are made, and what says their size.
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
    """The functions of which all must say yes, each by the name of the one that made it."""
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
