"""Modules of a model that mix tokens outside of attention: a rank has its own tokens alone, so they
would compute something else, without a word.

They are found by what they hold (a convolution over tokens, a recurrent layer of PyTorch) and by
the names that transformers give to such classes. What is computed by functions alone is not seen.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

from torch import nn

from mesh_attention.errors import MeshAttentionError

_NAMES = re.compile(
    r"(Mixer|Mamba\d*|MambaLayer|SSM|DeltaNet|DeltaAttention|LinearAttention|LightningAttention|"
    r"ShortConv(olution)?|RecurrentBlock|Rglru|RetNet|Retention|Hyena|Indexer|Compressor|"
    r"NGramEmbedding)$"
)


def refuse_token_mixers(model: nn.Module, handled: Collection[str]) -> None:
    """But those whose classes the caller says are `handled`, with all in them."""
    if isinstance(handled, str) or not all(isinstance(name, str) for name in handled):
        raise MeshAttentionError(f"handled={handled!r}: give a list of the names of classes")
    mixers = dict(_mixers(model, "", handled))
    if mixers:
        which = ", ".join(f"{name} ({why})" for name, why in mixers.items())
        raise MeshAttentionError(
            f"{type(model).__name__} mixes tokens outside of attention, where a rank would see its "
            f"own alone: {which}. If you make them see all tokens, say handled={[*mixers]}; "
            "otherwise this model cannot be split over ranks"
        )


def _mixers(module: nn.Module, holder: str, handled: Collection[str]) -> Iterator[tuple[str, str]]:
    """Names of classes, and why; a convolution is named by what holds it."""
    name = type(module).__name__
    if name in handled:
        return
    if isinstance(module, nn.Conv1d) and module.kernel_size[0] > 1:
        yield holder, "convolves"
    elif isinstance(module, nn.RNNBase) or _NAMES.search(name):
        yield name, "by its name"
    for child in module.children():
        yield from _mixers(child, name, handled)
