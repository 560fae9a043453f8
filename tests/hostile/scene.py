"""One use of the library from the constructor to the loss, in which one argument of one call has a
strange value.

What is accepted must mean something: numbers are held against what the arguments say, and a value
that says nothing is to be refused by name.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from numbers import Real
from random import Random
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from hostile.strange_values import random_value
from mesh_attention import ContextParallel, Mask, MeshAttentionError, mesh_attention
from mesh_attention.plan.methods.table import all_options
from support.dense_call import definition
from support.reference import visible

__all__ = ["CALLS", "Scene", "arguments_of", "outcome_of"]

TOKENS, HEADS, KV_HEADS, HEAD_DIM, CLASSES = 12, 4, 2, 8, 11
OBJECT: dict[str, Any] = {
    "seq_len": TOKENS,
    "num_heads": HEADS,
    "num_kv_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "causal": True,
    "dtype": torch.float64,
}
CALLS: dict[str, Callable[..., Any]] = {
    "ContextParallel": ContextParallel,
    "attention": ContextParallel.attention,
    "mesh_attention": mesh_attention,
    "shard": ContextParallel.shard,
    "unshard": ContextParallel.unshard,
    "positions": ContextParallel.positions,
    "padding": ContextParallel.padding,
    "documents": ContextParallel.documents,
    "shard_batch": ContextParallel.shard_batch,
    "cross_entropy": ContextParallel.cross_entropy,
    "context_parallel": ContextParallel.context_parallel,
}
# What messages say instead of the name of the argument.
ALIASES = {
    "kv_seq_len": ("seq_len", "kv_tokens", "tokens", "local_seq"),
    "seq_len": ("q_tokens", "tokens", "local_seq"),
    "group_or_mesh": ("group", "mesh"),
    "group": ("mesh",),
    "data_parallel": ("group",),
    "cu_seqlens": ("documents", "starts", "cumulative"),
    "kv_cu_seqlens": ("documents", "starts", "cumulative", "kv_documents"),
    "window_size": ("window",),
    "tuned": ("file", "No such"),
    "plan": ("Plan", "file", "No such"),
    "cluster": ("file", "No such"),
    "buffer_seq_dims": ("buffers",),
    "no_restore_buffers": ("buffers",),
    "backward_tile": ("tile",),
    "q": ("dtype",),
    "x": ("tensor", "slots"),
    "dim": ("dimension",),
    "input_ids": ("batch",),
}


class NonsenseError(Exception):
    """A value was accepted that says nothing."""


class WrongNumberError(Exception):
    """A result is not what the arguments say."""


class Scene:
    """`strange`: the call and the argument that are not as usual, or none; `chance` draws the
    value. `group`: of all ranks that play the scene."""

    def __init__(
        self, strange: tuple[str, str] | None, chance: Random, group: dist.ProcessGroup | None
    ) -> None:
        self.strange = strange
        value = random_value(chance)
        self.value = value if strange else None
        self.inside = False  # the call with the strange value
        self.group = group
        draw = torch.Generator().manual_seed(chance.randrange(1 << 30))
        shapes = {"q": HEADS, "k": KV_HEADS, "v": KV_HEADS}
        self.whole = {
            name: torch.randn(2, TOKENS, heads, HEAD_DIM, generator=draw, dtype=torch.float64)
            for name, heads in shapes.items()
        }
        self.ids = torch.randint(CLASSES, (2, TOKENS), generator=draw)
        self.logits = torch.randn(2, TOKENS, CLASSES, generator=draw, dtype=torch.float64)

    def _call(self, name: str, function: Callable[..., Any], **usual: Any) -> Any:
        """With the strange value in its place."""
        if self.strange is None or self.strange[0] != name:
            return function(**usual)
        self.inside = True
        result = function(**self._arguments(name, usual))
        self.inside = False
        return result

    def _arguments(self, name: str, usual: dict[str, Any]) -> dict[str, Any]:
        if self.strange is None or self.strange[0] != name:
            return usual
        return usual | {self.strange[1]: self.value}

    def play(self) -> None:
        """Raises what the library raises, or `NonsenseError` or `WrongNumberError`."""
        if self.strange is not None and self.strange[0] == "mesh_attention":
            self._function()
            return
        usual = OBJECT if self.strange != ("ContextParallel", "plan") else {}
        group = {"group_or_mesh": self.group}
        cp = self._call("ContextParallel", ContextParallel, **(group | usual))
        try:
            self._use(cp, self._arguments("ContextParallel", usual))
        finally:
            cp.close()

    def _use(self, cp: ContextParallel, asked: dict[str, Any]) -> None:
        positions = self._call("positions", cp.positions)
        padding = self._call("padding", cp.padding)
        if positions.is_meta or padding.is_meta:  # without numbers, as was asked
            return
        local = {
            name: self._call("shard", cp.shard, x=x, dim=1, side="q")
            for name, x in self.whole.items()
        }
        out = self._call("attention", cp.attention, **local)
        if isinstance(out, tuple):
            self._must_be_a_flag("attention", "return_lse")
            out = out[0]
        self._compare(out, positions, asked, "attention")
        _equal(padding.cpu(), positions.cpu() >= TOKENS, "padding")
        whole = self._call("unshard", cp.unshard, x=local["q"], dim=1)
        if self.strange != ("unshard", "x"):
            _equal(whole, self.whole["q"], "unshard")
        elif dist.get_world_size(self.group) == 1 and not whole.is_meta:
            _equal(whole, torch.as_tensor(self.value), "unshard")
        self._batch(cp)

    def _batch(self, cp: ContextParallel) -> None:
        handle = self._call("documents", cp.documents, cu_seqlens=(0, 5, TOKENS))
        batch = self._call(
            "shard_batch", cp.shard_batch,
            input_ids=self.ids, labels=self.ids, cu_seqlens=None, documents=handle,
        )  # fmt: skip
        at = cp.positions(documents=batch.documents)
        if self.strange is None or self.strange[0] not in ("documents", "shard_batch"):
            real = at < TOKENS
            _equal(batch.input_ids[:, real], self.ids[:, at[real]], "input_ids")
        if batch.labels is None or batch.input_ids is None:
            return
        logits = self.logits[:, at.clamp(max=TOKENS - 1) % TOKENS]
        if logits.shape[:2] != batch.labels.shape:  # another batch was asked for
            return
        asked = {"logits": logits, "targets": batch.labels, "reduce": "sum"}
        mean = self._call("cross_entropy", cp.cross_entropy, **asked)
        self._compare_loss(mean, self._arguments("cross_entropy", asked))
        with self._call("context_parallel", cp.context_parallel, documents=batch.documents):
            pass

    def _function(self) -> None:
        with ContextParallel(self.group, **OBJECT) as cp:
            local = {name: cp.shard(x, 1) for name, x in self.whole.items()}
            positions = cp.positions()
        asked = local | {"causal": True, "group": self.group}
        out = self._call("mesh_attention", mesh_attention, **asked)
        if isinstance(out, tuple):
            self._must_be_a_flag("mesh_attention", "return_lse")
            out = out[0]
        if self.strange is None or self.strange[1] not in ("layout", "relayout", "stretches"):
            asked = self._arguments("mesh_attention", asked)
            self._compare(out, positions, asked, "mesh_attention")
        # Otherwise the shards were said to lie in another way than they do.

    # What was asked for.

    def _must_be_a_flag(self, call: str, argument: str) -> None:
        if self.strange != (call, argument) or not isinstance(self.value, bool | np.bool_):
            raise NonsenseError(f"{argument}={self.value!r}")

    def _compare(self, out: Tensor, positions: Tensor, asked: dict[str, Any], call: str) -> None:
        mask, scale, softcap = meaning(asked)
        arguments: dict[str, Tensor] = dict(self.whole)
        if self.strange is not None and self.strange[0] == call:
            argument = self.strange[1]
            if argument in arguments:
                if not _same_tensor(self.value, arguments[argument]):
                    raise NonsenseError(f"{argument} of shape {getattr(self.value, 'shape', None)}")
            elif argument == "sinks" and self.value is not None:
                arguments["sinks"] = torch.as_tensor(self.value)
            elif argument in ("dropout_p", "alibi_slopes") and self.value not in (None, 0):
                raise NonsenseError(f"{argument}={self.value!r}")
        arguments["grad_out"] = torch.ones(2, TOKENS, HEADS, HEAD_DIM, dtype=torch.float64)
        truth = definition(arguments, visible(mask, TOKENS, TOKENS), scale, softcap)["out"]
        real = positions.cpu() < TOKENS
        _equal(out.detach()[:, real].double(), truth[:, positions[real]], call)

    def _compare_loss(self, mean: Any, asked: dict[str, Any]) -> None:
        targets, logits = asked["targets"], asked["logits"]
        smoothing, ignored = asked.get("label_smoothing", 0.0), asked.get("ignore_index", -100)
        losses = functional.cross_entropy(
            logits.double().flatten(0, -2), targets.flatten().long(), ignore_index=int(ignored),
            reduction="none", label_smoothing=float(smoothing),
        ).sum()  # fmt: skip
        number = asked.get("num_targets")
        count = int((targets != ignored).sum()) if number is None else int(number)
        if dist.get_world_size(self.group) == 1:
            _equal(mean.value.double(), losses / max(count, 1), "cross_entropy")


def meaning(asked: dict[str, Any]) -> tuple[Mask, float | None, float | None]:
    """The mask, the scale and the softcap that arguments of an object or the function ask for."""
    causal, mask, window = asked.get("causal"), asked.get("mask"), asked.get("window_size")
    if not isinstance(causal, bool | np.bool_ | None):
        raise NonsenseError(f"causal={causal!r}")
    if asked.get("plan") is not None:
        raise NonsenseError(f"plan={asked['plan']!r}")
    if mask is None:
        sides = None
        if window is not None:
            left, right = (None if int(side) == -1 else int(side) for side in window)
            sides = (left, right)
        mask = Mask(causal=bool(causal), window=sides)
    numbers = []
    for name in ("softmax_scale", "softcap"):
        value = asked.get(name)
        if isinstance(value, bool) or not isinstance(value, Real | None):
            raise NonsenseError(f"{name}={value!r}")
        numbers.append(
            None if value is None or (name == "softcap" and value == 0) else float(value)
        )
    return mask, numbers[0], numbers[1]


def _same_tensor(value: Any, usual: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == usual.shape and torch.equal(value, usual)


def _equal(result: Tensor, wanted: Tensor, what: str) -> None:
    if result.shape != wanted.shape:
        raise WrongNumberError(f"{what}: shape {tuple(result.shape)}, not {tuple(wanted.shape)}")
    if not torch.equal(result.isnan(), wanted.isnan()):  # sinks may be NaN, say
        raise WrongNumberError(f"{what}: NaN in other places")
    apart = (result.double() - wanted.double()).abs()[~wanted.isnan()]
    distance = apart.max().item() if apart.numel() else 0.0
    if not distance <= 1e-9:
        raise WrongNumberError(f"{what}: off by {distance}")


def arguments_of(call: str) -> list[str]:
    """By name; where a call takes any, one that it cannot know."""
    parameters = inspect.signature(CALLS[call]).parameters.values()
    names = [
        "nonsense" if each.kind is each.VAR_KEYWORD else each.name
        for each in parameters
        if each.name != "self"
    ]
    if call in ("ContextParallel", "mesh_attention"):
        names += all_options()
    return sorted({*names})


def outcome_of(scene: Scene) -> tuple[str, str]:
    """What became of a scene, and what is wrong with it."""
    try:
        scene.play()
    except (NonsenseError, WrongNumberError) as error:
        kind = "nonsense accepted" if isinstance(error, NonsenseError) else "wrong number"
        return kind, f"{kind}: {error}"
    except (MeshAttentionError, ValueError, TypeError) as error:
        if not isinstance(error, MeshAttentionError) and not scene.inside:
            return "foreign", f"{type(error).__name__}: {error}"
        if not scene.inside or scene.strange is None:
            return "refused later", ""
        name = scene.strange[1]
        known = (name, *ALIASES.get(name, ()))
        if any(re.search(rf"(?<!\w){re.escape(word)}(?!\w)", str(error)) for word in known):
            return f"refused: {type(error).__name__}", ""
        return "not named", f"not named: {type(error).__name__}: {error}"
    except Exception as error:
        return "foreign", f"{type(error).__name__}: {error}"
    return "accepted", ""
