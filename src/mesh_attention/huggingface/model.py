"""`ModelContextParallel`: a Hugging Face model on ranks.

It has one `ContextParallel` for each kind of layer (mask and softcap), all on one group; the layout
of a batch is chosen for all of them. `model_checks.py` says which models it takes, `model_hooks.py`
checks each call of the model, `attention.py` is what layers call.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple, Never

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import cross_entropy

from mesh_attention.api.context_parallel import ContextParallel
from mesh_attention.diagnose.runs import Step
from mesh_attention.errors import MeshAttentionError
from mesh_attention.huggingface.masks import LayerMask
from mesh_attention.huggingface.model_checks import (
    INPUTS,
    SHOWN,
    compare_with_one_process,
    refuse_model,
    shifts_labels,
    transformers_model,
)
from mesh_attention.huggingface.model_hooks import ModelHook, pools
from mesh_attention.request.attend import attend
from mesh_attention.request.tensor_checks import AttentionCall
from mesh_attention.runtime.session.collective_call import collective_call, of_object
from mesh_attention.train.means import Reduce
from mesh_attention.train.sharded_batch import ShardedBatch


class LayerKind(NamedTuple):
    """In what the layers of a model differ, as arguments of `ContextParallel`."""

    causal: bool
    window_size: tuple[int, int] | None
    softcap: float | None


class ModelContextParallel(ContextParallel):
    """A `ContextParallel` for all layers of a model, which then attends over the group.

        cp = ModelContextParallel(model, mesh["cp"])
        batch = cp.shard_batch(**whole)
        logits = model(**batch.model_inputs()).logits
        mean = cp.cross_entropy(logits, batch.labels, reduce="ddp")

    model     a transformers model for causal or masked language modelling, plain or with LoRA
              (peft), one that classifies tokens or sequences, or one without a head; give it before
              DDP or FSDP wrap it
    untested  take models that are not in the table of `docs/models.md`. Layers whose masks are
              others than causal or both directions, with a window or in chunks, are refused all the
              same, and so are modules that mix tokens outside of attention (convolutions, state-
              space layers) and types that are known to differ.
              The first `shard_batch` compares the model with one process, up to 2,048 tokens of its
              first row in both passes, and raises what differs: in time and memory a step of one
              process on so many tokens, once
    handled   names of classes of such modules that you make see the tokens of all ranks
    reduce    what averages gradients over the ranks, "ddp" or "fsdp"; "sum" if they are added up.
              For heads that classify sequences (rewards), whose `logits` are then those of whole
              rows on all ranks, and for `aux_loss`, which balances experts over the tokens of all
              ranks where `output_router_logits` asks for it
    options   as of `ContextParallel`, but for those that the model says: sizes and masks

    `generate` works on whole sequences at any time; `with cp.own_attention():` makes the model do
    so for a while, and `close()` for good.
    """

    def __init__(
        self,
        model: nn.Module,
        group_or_mesh: dist.ProcessGroup | DeviceMesh | None = None,
        *,
        untested: bool = False,
        handled: Collection[str] = (),
        reduce: Reduce | None = None,
        **options: Any,
    ) -> None:
        self.model = own = transformers_model(model)
        config = own.config.get_text_config()
        refuse_model(own, config, untested, handled, reduce, options)
        first, *rest = _kinds(own, config)
        sizes = {} if untested or getattr(own, "tp_size", None) else _heads(own, config)
        self._of_layers = options | sizes
        self._pools = pools(own)
        self._shifts_labels = shifts_labels(own)
        super().__init__(group_or_mesh, **self._of_layers, **first._asdict())
        self._by_kind: dict[LayerKind, ContextParallel] = {first: self}
        self._hook: ModelHook | None = None
        self._names = frozenset(inspect.signature(own.forward).parameters)
        self._uncompared = model if untested and config.model_type not in SHOWN else None
        try:
            for kind in rest:
                self._of(kind)
            self._hook = ModelHook(own, self, reduce)
        except BaseException:
            self.close()
            raise

    def shard_batch(
        self, *batches: Never, shift_labels: bool | None = None, **whole: Any
    ) -> ShardedBatch:
        """As of `ContextParallel`. Left out, `shift_labels` is True for models that predict the
        next token. Documents may come as collators of transformers give them to flash-attn. Other
        tensors go to the model only if its forward has an argument of their name."""
        if self._pools and whole.get("labels") is not None:
            raise MeshAttentionError(
                "labels are those of rows here: keep them, and give them to a loss with "
                "model(**batch.model_inputs()).logits, which all ranks have of all rows"
            )
        of_collator = {name: whole.pop(name, None) for name in _OF_FLASH_ATTENTION}
        if of_collator["cu_seq_lens_q"] is not None:
            whole["cu_seqlens"] = of_collator["cu_seq_lens_q"]
        whole["shift_labels"] = self._shifts_labels if shift_labels is None else shift_labels
        model, self._uncompared = self._uncompared, None
        if model is not None and not batches:
            compare_with_one_process(self, model, whole)
        return replace(super().shard_batch(*batches, **whole), of_model=self._names)

    def plain_step(self) -> Step:
        """What `doctor` compares ranks with: the loss by the model's own attention. From now on
        `shard_batch` compares nothing by itself."""
        self._uncompared = None
        return lambda model, whole: self.plain_loss(model, self.shard_batch(**whole), whole)

    def plain_loss(
        self, model: Any, part: ShardedBatch, whole: Any, router: float = 0.0, **loss: Any
    ) -> Tensor:
        """The loss of a whole batch by the model's own attention. `part` is the shard of one rank
        of one, so all of it; rows that became one pack are made rows again. `router`: the weight of
        `aux_loss`; `loss`: options of torch's `cross_entropy`."""
        size = next(x for n in INPUTS if (x := whole.get(n)) is not None).shape[:2]
        inputs = {n: x for n, x in part.model_inputs().items() if n != "documents"}
        inputs = {name: x.reshape(*size, *x.shape[2:]) for name, x in inputs.items()}
        if whole.get("attention_mask") is not None:
            inputs["attention_mask"] = whole["attention_mask"].to(part.position_ids.device)
        with self.own_attention():
            outputs = model(**inputs, use_cache=False)
        logits = outputs.logits.flatten(0, 1)
        wide = logits if logits.element_size() >= 4 else logits.float()
        assert part.labels is not None
        mean = cross_entropy(wide, part.labels.flatten(), **loss)
        return mean + router * outputs.aux_loss if router else mean

    @contextmanager
    def own_attention(self) -> Iterator[None]:
        """Inside, the model attends to whole sequences by itself. `generate` needs no block."""
        hook, self._hook = self._hook, None
        if hook is None:
            yield
            return
        hook.remove()
        try:
            yield
        finally:
            hook.add()
            self._hook = hook

    def attend_layer(
        self,
        tensors: tuple[Tensor, Tensor, Tensor],
        fault: MeshAttentionError | None,
        mask: LayerMask,
        softcap: float | None,
        **call: Any,
    ) -> Tensor:
        """Attention of one layer, by the object of its kind. Not for users: `attention.py` calls
        it. `call` are fields of `AttentionCall`; chunks of the mask are in its documents already.
        """
        cp = self if fault else self._of(LayerKind(mask.causal, mask.window, softcap or None))
        return _attend(cp, tensors, fault, **call)

    def _of(self, kind: LayerKind) -> ContextParallel:
        """The object of a kind. Kinds that the config does not say are made when a layer comes, on
        all ranks alike."""
        if kind not in self._by_kind:
            group = self._calls.session.groups.parent
            cp = ContextParallel(group, **self._of_layers, **kind._asdict())
            self._by_kind[kind] = cp
            self._calls.companions.append(cp._calls)
        return self._by_kind[kind]

    def close(self) -> None:
        if self._hook is not None:
            self._hook.remove()
        for cp in list(self._by_kind.values())[1:]:
            cp.close()
        super().close()


@collective_call(of_object)
def _attend(
    cp: ContextParallel,
    tensors: tuple[Tensor, Tensor, Tensor],
    fault: MeshAttentionError | None,
    **call: Any,
) -> Tensor:
    out, _ = attend(cp._calls, AttentionCall(*tensors, **call), fault)
    return out


def _kinds(model: nn.Module, config: Any) -> list[LayerKind]:
    """The kinds of layers that the config announces, those without a window first. Only the choice
    of the layout depends on it: each layer says its kind when it attends."""
    window, types = _field(config, "sliding_window"), _field(config, "layer_types")
    softcap = _field(config, "attn_logit_softcapping")
    causal = not any(getattr(module, "is_causal", True) is False for module in model.modules())
    behind = None if not window else (window - 1, 0) if causal else (window, window)
    windows = (
        {behind} if types is None else {behind if "sliding" in name else None for name in types}
    )
    return [
        LayerKind(causal, window, softcap)
        for window in sorted(windows, key=lambda window: (window is not None, window))
    ]


def _heads(model: nn.Module, config: Any) -> dict[str, int]:
    """Heads of all layers, if their projections have the sizes that the config says. Otherwise
    nothing (MLA, layers that differ): sizes then come with tensors."""
    heads, hidden = _field(config, "num_attention_heads"), _field(config, "hidden_size")
    if not heads or not hidden:
        return {}
    kv_heads = _field(config, "num_key_value_heads") or heads
    head_dim = _field(config, "head_dim") or hidden // heads
    wanted = [heads * head_dim, kv_heads * head_dim, kv_heads * head_dim]
    projections = ("q_proj", "k_proj", "v_proj")
    sizes = [
        [getattr(getattr(module, name), "out_features", None) for name in projections]
        for module in model.modules()
        if all(hasattr(module, name) for name in projections)
    ]
    if not sizes or any(size != wanted for size in sizes):
        return {}
    return {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": head_dim}


def _field(config: Any, name: str) -> Any:
    try:
        return getattr(config, name, None)
    except RuntimeError:  # layers differ in it
        return None


_OF_FLASH_ATTENTION = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
