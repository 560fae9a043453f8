"""Which models may attend over ranks: everything that would be wrong in silence is refused here, by
name, before a model is touched.

`models.toml` has the types of transformers models that are shown to have losses, logits and
gradients of one process, and those that do not. `tests/huggingface/model_sweep.py` makes it, and
the table of `docs/models.md`.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

from mesh_attention.errors import MeshAttentionError
from mesh_attention.huggingface.whole_outputs import fault_of_router, pools, refuse_unreduced

_TABLE = tomllib.loads(Path(__file__).with_name("models.toml").read_text())


def _by_type(section: str) -> dict[str, str]:
    return {name: text for text, names in _TABLE[section].items() for name in names}


SHOWN = _by_type("exact")  # by type, what its layers have
REFUSED = _by_type("refused")  # why: what is seen of each model anew
DIFFERENT = _by_type("different")  # why: what is not seen, so they are always refused


def transformers_model(model: nn.Module) -> Any:
    base: Any = getattr(model, "get_base_model", None)  # of peft
    if base is not None:
        model = base()
    if not isinstance(model, PreTrainedModel):
        inside = getattr(model, "module", None)
        hint = ": give the model inside, before it is wrapped" if inside is not None else ""
        raise MeshAttentionError(
            f"the model is a {type(model).__name__}, which is no model of transformers{hint}"
        )
    return model


_SAID_BY_MODEL = (
    *("plan", "seq_len", "kv_seq_len", "num_heads", "num_kv_heads", "head_dim", "v_head_dim"),
    *("causal", "mask", "window_size", "softmax_scale", "softcap"),
)


def refuse_model(
    model: Any,
    config: Any,
    untested: bool,
    handled: Collection[str],
    reduce: Any,
    options: dict[str, Any],
) -> None:
    said = [name for name in _SAID_BY_MODEL if options.get(name) is not None]
    if said:
        raise MeshAttentionError(f"{', '.join(said)}: the model says this; leave it out")
    _refuse_head(model)
    name = config.model_type
    if name in DIFFERENT:
        raise MeshAttentionError(
            f"models of type {name!r} are refused: they {DIFFERENT[name]}, so their numbers would "
            "be others than those of one process"
        )
    if name not in SHOWN and not untested:
        why = f": they {REFUSED[name]}" if name in REFUSED else ""
        raise MeshAttentionError(
            f"models of type {name!r} have not been shown to be exact{why}. The {len(SHOWN)} types "
            "that have are in docs/models.md; with untested=True others are taken, if nothing "
            "else is against it, and compared with one process on their first batch"
        )
    _refuse_token_mixers(model, handled)
    if not model._supports_attention_backend and not any(
        hasattr(sys.modules[type(part).__module__], "ALL_ATTENTION_FUNCTIONS")
        for part in model.modules()
    ):
        raise MeshAttentionError(
            f"{type(model).__name__} does not use AttentionInterface in this version of "
            "transformers, so its layers would see the tokens of this rank alone"
        )
    refuse_unreduced(model, reduce)
    fault = fault_of_router(model, reduce) if getattr(config, "output_router_logits", 0) else None
    if fault is not None:
        raise MeshAttentionError(f"config.output_router_logits=True: {fault}")
    if getattr(config, "output_attentions", False):
        raise MeshAttentionError("output_attentions=True: attention weights are never made")
    for module in model.modules():
        rope_types = getattr(module, "rope_type", None)  # or one for each kind of layer
        for name in rope_types.values() if isinstance(rope_types, dict) else [rope_types]:
            if isinstance(name, str) and ("dynamic" in name or name == "longrope"):
                raise MeshAttentionError(
                    f"rope_type={name!r} depends on the longest sequence of a batch, and a rank "
                    "knows its own tokens alone; take yarn, linear or llama3 scaling"
                )


def _refuse_head(model: Any) -> None:
    """Heads that read one token, or all, would read those of this rank."""
    known = ("ForCausalLM", "ForMaskedLM", "ForTokenClassification", "Model")
    other = ("PreTrainedModel", "DoubleHeadsModel")
    names = [base.__name__ for base in type(model).__mro__]
    if not pools(model) and not any(
        name.endswith(known) and not name.endswith(other) for name in names
    ):
        raise MeshAttentionError(
            f"{names[0]} has a head that may take the tokens of this rank for the whole sequence, "
            "as where it reads the first one; supported: ...ForCausalLM, ...ForMaskedLM, "
            "...ForTokenClassification, ...ForSequenceClassification that reads the last token, "
            "and models without a head (...Model). Take the last, and call the head on what "
            "cp.unshard(hidden, 1, documents=batch.documents, grad='sum') gives under DDP"
        )


def shifts_labels(model: Any) -> bool:
    """Whether its labels are those of each token itself and the next one is learned. Not of models
    that classify tokens or fill in masked ones."""
    kind = getattr(model, "loss_type", None) or "ForCausalLM"
    return LOSS_MAPPING.get(kind) is ForCausalLMLoss


# Modules that mix tokens outside of attention are found by what they hold (a convolution over
# tokens, a recurrent layer of PyTorch) and by the names of their classes in transformers. What is
# computed by functions alone is not seen.
_NAMES = re.compile(
    r"(Mixer|Mamba\d*|MambaLayer|SSM|DeltaNet|DeltaAttention|LinearAttention|LightningAttention|"
    r"ShortConv(olution)?|RecurrentBlock|Rglru|RetNet|Retention|Hyena|Indexer|Compressor|"
    r"NGramEmbedding)$"
)


def _refuse_token_mixers(model: nn.Module, handled: Collection[str]) -> None:
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
