"""What a layer of a Hugging Face model sees, read from the mask function that the model makes.

Models say their masks as functions of indices, put together from a few that transformers has. No
tensor is made of them here: causal, and causal with a window, is all that they may say. Documents
and padding are those of the batch, so what the model concludes about documents from the positions
of this rank's tokens is left out.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from mesh_attention.errors import MeshAttentionError


@dataclass(frozen=True)
class LayerMask:
    """Goes through the model in place of a mask.

    window   keys that a query sees, itself among them; None: all before it
    refused  why the mask is another one
    """

    window: int | None = None
    refused: str | None = None

    def __getattr__(self, name: str) -> Any:
        raise MaskIsReadError(f".{name}")

    def __getitem__(self, index: Any) -> Any:
        raise MaskIsReadError("[...]")


class MaskIsReadError(MeshAttentionError, AttributeError):
    """By a layer, which then does something with it that is not known here. To those who only look
    whether something is there, it is not."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"a layer of the model reads its mask as a tensor (mask{what}), as those of Doge do: "
            "attention over ranks makes no such tensor, so this model cannot attend over ranks"
        )


def layer_mask(*args: Any, **arguments: Any) -> LayerMask:
    """What `AttentionMaskInterface` has registered. Arguments differ between versions, so they are
    asked for by name, and what is not there is refused."""
    if arguments.get("attention_mask") is not None:
        return LayerMask(refused="attention_mask was given to the model: give it to shard_batch")
    function_of_mask = arguments.get("mask_function")
    if function_of_mask is None:
        return LayerMask(refused="this version of transformers says its masks in another way")
    window, causal = None, False
    for name, function in _parts(function_of_mask):
        if name == "causal_mask_function":
            causal = True
        elif name == "sliding_window_overlay" and window is None:
            window = inspect.getclosurevars(function).nonlocals["sliding_window"]
        elif name != "packed_sequence_mask_function":
            return LayerMask(
                refused=f"the mask of the layer has {name}, and may be causal, with a "
                "window or without"
            )
    if not causal:
        return LayerMask(refused="the mask of the layer is not causal")
    return LayerMask(window)


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
