"""Checks that keep `ModelContextParallel` from silently giving wrong numbers: `refuse_model`,
before it changes a model, and `compare_with_one_process`, on the first batch of an untested one.

`models.toml` lists the types of transformers models whose losses, logits and gradients were shown
to be those of one process, and the types that differ. `tests/huggingface/model_sweep.py` makes it,
and the table of `docs/models.md`.
"""

from __future__ import annotations

import inspect
import re
import sys
import tomllib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any
from warnings import warn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

from mesh_attention.diagnose.doctor import diagnose
from mesh_attention.errors import MeshAttentionError
from mesh_attention.huggingface.model_hooks import fault_of_router, pools
from mesh_attention.train.means import TokenMean, refuse_reduce

INPUTS = ("input_ids", "inputs_embeds")
_COMPARED = 2048  # tokens of the first batch of a model that is untested
_TABLE = tomllib.loads(Path(__file__).with_name("models.toml").read_text())


def _by_type(section: str) -> dict[str, str]:
    return {name: text for text, names in _TABLE[section].items() for name in names}


SHOWN = _by_type("exact")  # by type, the features of its layers
REFUSED = _by_type("refused")  # by type, a fault that the checks below see in the model itself
DIFFERENT = _by_type("different")  # by type, a fault that no check sees: always refused


def transformers_model(model: nn.Module) -> Any:
    """`model` itself, or the model that peft has wrapped; raises if it is not of transformers."""
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
    """Raises unless the model is exact on ranks, as far as that is known. `handled`: classes of
    modules that mix tokens, which the caller has adapted."""
    repeated = [name for name in _SAID_BY_MODEL if options.get(name) is not None]
    if repeated:
        raise MeshAttentionError(f"{', '.join(repeated)}: the model says this; leave it out")
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
    if reduce is not None:
        refuse_reduce(reduce)
    elif pools(model):
        raise MeshAttentionError(
            f"{type(model).__name__} reads one token of each row, which all ranks then have: say "
            "reduce='ddp' or 'fsdp', whichever averages gradients over the ranks, or 'sum' if you "
            "add them up"
        )
    fault = fault_of_router(model, reduce) if getattr(config, "output_router_logits", 0) else None
    if fault is not None:
        raise MeshAttentionError(f"config.output_router_logits=True: {fault}")
    if getattr(config, "output_attentions", False):
        raise MeshAttentionError("output_attentions=True: attention weights are never made")
    for module in model.modules():
        rope_types = getattr(module, "rope_type", None)  # a name, or names by kind of layer
        for name in rope_types.values() if isinstance(rope_types, dict) else [rope_types]:
            if isinstance(name, str) and ("dynamic" in name or name == "longrope"):
                raise MeshAttentionError(
                    f"rope_type={name!r} depends on the longest sequence of a batch, and a rank "
                    "knows its own tokens alone; take yarn, linear or llama3 scaling"
                )


def _refuse_head(model: Any) -> None:
    """Raises for a head that reads one token, or all tokens: it would read those of this rank."""
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
    """Whether the model's loss shifts labels by one token, as for causal models. Losses of models
    that classify tokens or fill in masked tokens do not."""
    kind = getattr(model, "loss_type", None) or "ForCausalLM"
    return LOSS_MAPPING.get(kind) is ForCausalLMLoss


# Modules that mix tokens outside of attention are recognised by type (a convolution over tokens, a
# recurrent layer of PyTorch) or by the name of their class. Functions that mix tokens are not seen.
_MIXER_NAMES = re.compile(
    r"(Mixer|Mamba\d*|MambaLayer|SSM|DeltaNet|DeltaAttention|LinearAttention|LightningAttention|"
    r"ShortConv(olution)?|RecurrentBlock|Rglru|RetNet|Retention|Hyena|Indexer|Compressor|"
    r"NGramEmbedding)$"
)


def _refuse_token_mixers(model: nn.Module, handled: Collection[str]) -> None:
    """Modules of a class in `handled` are allowed, with all modules inside them."""
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


def _mixers(module: nn.Module, parent: str, handled: Collection[str]) -> Iterator[tuple[str, str]]:
    """(class, reason) of each token mixer; a convolution goes by the class of its parent."""
    name = type(module).__name__
    if name in handled:
        return
    if isinstance(module, nn.Conv1d) and module.kernel_size[0] > 1:
        yield parent, "convolves"
    elif isinstance(module, nn.RNNBase) or _MIXER_NAMES.search(name):
        yield name, "by its name"
    for child in module.children():
        yield from _mixers(child, name, handled)


def compare_with_one_process(cp: Any, model: nn.Module, batch: Mapping[str, Any]) -> None:
    """Raises if an untested model differs on ranks from one process, in either pass, on the first
    row of this batch: its first tokens, as one document."""
    name = next((n for n in INPUTS if isinstance(batch.get(n), Tensor)), None)
    is_fsdp = isinstance(model, FSDPModule)
    below = any(isinstance(x, FSDPModule) for x in model.modules())
    if name is None or cp._pools or (below and not is_fsdp):
        warn(
            f"untested=True: {type(model).__name__} is not compared with one process by itself, "
            "since its batches have no input_ids, its outputs are those of rows, or FSDP2 has "
            "parts of it alone; call mesh_attention.doctor",
            stacklevel=3,
        )
        return
    takes = inspect.signature(model.forward).parameters
    how = {"use_cache": False} if {"use_cache", "kwargs"} & {*takes} else {}

    def output(inputs: dict[str, Any]) -> Tensor:
        outputs = model(**inputs, **how)
        out: Tensor = outputs.logits if hasattr(outputs, "logits") else outputs.last_hidden_state
        wide = torch.promote_types(out.dtype, torch.float32)
        return out.to(wide).square().mean(-1)

    def step(model: Any, whole: dict[str, Any]) -> TokenMean:
        part = cp.shard_batch(**whole)
        reduce: Any = "fsdp" if is_fsdp else "sum"
        mean: TokenMean = cp.token_mean(
            output(part.model_inputs()), ~part.padding, reduce=reduce, documents=part.documents
        )
        return mean

    def plain(model: Any, whole: dict[str, Tensor]) -> Tensor:
        with cp.own_attention():
            return output(whole).mean()

    group = cp._calls.session.groups.parent

    def add_up(model: nn.Module) -> None:
        for parameter in model.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad, group=group)

    first = batch[name][:1, :_COMPARED].to(next(model.parameters()).device)
    report = diagnose(step, {name: first}, model, [cp], group, plain, None if is_fsdp else add_up)
    if not report.is_right:
        raise MeshAttentionError(
            f"{type(model).__name__} is untested, and on ranks it is not the model that it is on "
            f"one process, by the first {first.shape[1]} tokens of this batch: {report}"
        )
