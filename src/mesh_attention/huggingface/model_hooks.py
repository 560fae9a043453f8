"""The hooks that `ModelContextParallel` attaches to its model.

`ModelHook` stands before the model: it checks the arguments of each call, and passes the object on
to the layers. `Generate` takes the place of `model.generate`.

`WholeOutputs` stands behind it, for outputs that a model makes of all its tokens: the scores of a
head for sequences, which reads one token of each row, and the loss that balances experts. The model
knows the tokens of this rank alone, so the hook computes these outputs from those of all ranks.
Their gradients suit how gradients of parameters are reduced (`reduce`).
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from functools import update_wrapper
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from mesh_attention.api.context_parallel import ContextParallel
from mesh_attention.errors import MeshAttentionError
from mesh_attention.huggingface.attention import NAME, WITHOUT_BATCH, ModelBatch, register
from mesh_attention.huggingface.masks import LayerMask
from mesh_attention.request.port_checks import fault_of_positions
from mesh_attention.runtime.session.collective_call import collective_call, of_object
from mesh_attention.runtime.session.documents import Documents
from mesh_attention.runtime.session.sharding import Grad
from mesh_attention.train.means import Means, Reduce
from mesh_attention.train.whole_batch import MARK, batch_of


class ModelHook:
    """A forward pre-hook of a model, which attends over ranks from `add` to `remove`. It refuses
    wrong arguments by name, and puts a `ModelBatch` in the place of `documents`. Copies of the
    model share it."""

    def __init__(self, model: Any, cp: Any, reduce: Reduce | None) -> None:
        register()
        if any(isinstance(hook, ModelHook) for hook in model._forward_pre_hooks.values()):
            raise MeshAttentionError("the model has a ModelContextParallel already; close() it")
        self._model, self._cp, self._reduce = model, cp, reduce
        self._names = [*inspect.signature(model.forward).parameters]
        self._outputs: WholeOutputs | None = None
        self.add()

    def add(self) -> None:
        self._before = self._model.config._attn_implementation
        self._model.set_attn_implementation(NAME)
        self._hook = self._model.register_forward_pre_hook(self, with_kwargs=True)
        if self._reduce is not None:
            self._outputs = WholeOutputs(self._model, self._cp, self._reduce)
        if hasattr(self._model, "generate"):
            self._model.generate = Generate(self._model, self._cp)

    def remove(self) -> None:
        self._hook.remove()
        self._model.__dict__.pop("generate", None)
        if self._outputs is not None:
            self._outputs.remove()
        if self._model.config._attn_implementation == NAME:
            self._model.set_attn_implementation(self._before)

    def __call__(self, model: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        arguments = dict(zip(self._names, args, strict=False)) | kwargs
        if model.config._attn_implementation != NAME:
            raise MeshAttentionError(
                f"the attention of the model was set to {model.config._attn_implementation!r} "
                "meanwhile, which sees the tokens of this rank alone; close() the object first"
            )
        documents = arguments.get("documents")
        if documents is None:
            raise MeshAttentionError(WITHOUT_BATCH)
        for name, way_out in _REFUSED.items():
            value = arguments.get(name)
            if isinstance(value, Tensor) or value not in (None, False, 0):
                raise MeshAttentionError(f"{name} was given to the model: {way_out}")
        if arguments.get("output_router_logits"):
            fault = fault_of_router(model, self._reduce)
            if fault is not None:
                raise MeshAttentionError(f"output_router_logits was given to the model: {fault}")
        position_ids = arguments.get("position_ids")
        if position_ids is None:
            raise MeshAttentionError(
                "position_ids were not given to the model, which would count this rank's tokens "
                "from 0: call it as model(**batch.model_inputs())"
            )
        if isinstance(documents, Documents) and not is_dynamo_compiling():
            fault_of_batch = _fault_of_batch(documents, position_ids)
            if fault_of_batch is not None:  # all ranks raise it
                self._cp.attend_layer((None, None, None), fault_of_batch, LayerMask(), None)
        return args, kwargs | {"documents": ModelBatch(self._cp, documents, position_ids)}

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelHook:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise MeshAttentionError(
            "a model on ranks holds a process group and cannot be pickled; save its state_dict, or "
            "close() the ModelContextParallel first"
        )


def _fault_of_batch(documents: Documents, position_ids: Tensor) -> MeshAttentionError | None:
    """Why documents and positions do not belong together."""
    own, batch = batch_of(position_ids), documents.plans.batch
    if own is None:  # not of shard_batch, so the host waits for them
        return fault_of_positions(documents.shards, "q", position_ids, documents.position_ids)
    if batch in (None, own):
        return None
    return MeshAttentionError(
        "documents are those of another batch than position_ids: call the model as "
        "model(**batch.model_inputs()), with all of one batch"
    )


_REFUSED = {
    "labels": "models shift labels, and those of shard_batch are targets already; take "
    "cp.cross_entropy(logits, batch.labels, ...)",
    "attention_mask": "shard_batch reads it, and makes documents of it",
    "past_key_values": "caches of earlier tokens are not supported over ranks",
    "output_attentions": "attention weights are never made",
    "logits_to_keep": "the last tokens of a rank are not the last of the sequence; use "
    "cp.unshard(logits, 1, documents=batch.documents)",
}


class Generate:
    """`model.generate`, for which the model attends to whole sequences by itself. Ranks that share
    parameters (FSDP2) must call it alike."""

    def __init__(self, model: Any, cp: Any) -> None:
        self._model, self._cp = model, cp
        update_wrapper(self, type(model).generate)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if any(hasattr(x, MARK) for x in (*args, *kwargs.values())):
            raise MeshAttentionError("generate takes whole sequences, and this is a rank's part")
        if self._cp is None:  # of a copy of the model, whose hook refuses it
            return type(self._model).generate(self._model, *args, **kwargs)
        with self._cp.own_attention():
            return type(self._model).generate(self._model, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Generate:
        return Generate(memo[id(self._model)], None)


def pools(model: nn.Module) -> bool:
    """Whether it is a head of transformers that reads the last token of each row."""
    return any(base.__name__ == "GenericForSequenceClassification" for base in type(model).__mro__)


def fault_of_router(model: Any, reduce: Any) -> str | None:
    """Why the loss that balances experts is refused; None if it is not."""
    if reduce is None:
        return (
            "the loss that balances experts would be that of this rank's tokens alone; say "
            "reduce='ddp' (or 'fsdp', 'sum') where ModelContextParallel is made, or leave it out"
        )
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    own = getattr(sys.modules[type(model).__module__], "load_balancing_loss_func", None)
    if own is None or inspect.getsource(own) != inspect.getsource(load_balancing_loss_func):
        return (
            f"{type(model).__name__} balances no experts, or in another way than Mixtral does, "
            "which would look at this rank's tokens alone; leave it out"
        )
    return None


class WholeOutputs:
    """Forward hooks of one model, which `ModelHook` adds and removes. Copies of the model share
    them."""

    def __init__(self, model: Any, cp: ContextParallel, reduce: Reduce) -> None:
        self._cp, self._reduce = cp, reduce
        self._names = [*inspect.signature(model.forward).parameters]
        self._scores: Tensor | None = None  # of this rank's tokens
        self._hooks = [model.register_forward_hook(self, with_kwargs=True)]
        if pools(model):
            self._hooks.append(model.score.register_forward_hook(self._keep_scores))

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _keep_scores(self, module: nn.Module, args: Any, scores: Tensor) -> None:
        self._scores = scores

    def __call__(self, model: Any, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        arguments = dict(zip(self._names, args, strict=False)) | kwargs
        documents = arguments["documents"].documents
        if pools(model):
            scores, self._scores = self._scores, None
            if scores is None:
                raise MeshAttentionError(
                    "the layer `score` of the model was replaced after ModelContextParallel was "
                    "made: make it after that, as with peft's modules_to_save"
                )
            pad = model.config.get_text_config().pad_token_id
            ids = None if pad is None else arguments.get("input_ids")
            pooled = self._pooled(scores, ids, pad, documents)
            if isinstance(output, tuple):
                return (pooled, *output[1:])
            output.logits = pooled
        elif getattr(output, "aux_loss", None) is not None:
            top_k = model.config.get_text_config().num_experts_per_tok
            output.aux_loss = self._balance(output.router_logits, top_k, documents)
        elif isinstance(output, tuple) and arguments.get("output_router_logits"):
            raise MeshAttentionError("output_router_logits wants return_dict=True")
        return output

    def __deepcopy__(self, memo: dict[int, Any]) -> WholeOutputs:
        return self

    def _pooled(
        self, scores: Tensor, ids: Tensor | None, pad: int | None, documents: Documents
    ) -> Tensor:
        """Scores (rows, labels) of the last token that is no padding, as transformers find it."""
        grad: Grad = "own" if self._reduce == "sum" else "sum"
        whole = self._cp.unshard(scores, 1, documents=documents, grad=grad, label="scores")
        rows, tokens = whole.shape[:2]
        if ids is None:
            self._refuse_packed(torch.ones(rows, tokens, dtype=torch.bool), documents)
            return whole[:, -1]
        real = self._cp.unshard(ids, 1, documents=documents, label="ids of scores").ne(pad or 0)
        self._refuse_packed(real, documents)
        last = (torch.arange(tokens, device=real.device) * real).argmax(-1)
        return whole[torch.arange(rows, device=whole.device), last]

    def _refuse_packed(self, real: Tensor, documents: Documents) -> None:
        """Raises, on all ranks alike, if a row has several documents with tokens that are no
        padding. Only for a batch of several documents the host waits for the device."""
        rows, tokens = real.shape
        starts, num_rows = documents.pack.documents, documents.pack.num_rows
        if len(starts) - 1 <= num_rows:
            return
        slots = torch.arange(num_rows * tokens)
        numbers = torch.searchsorted(torch.tensor(starts), slots, right=True).view(num_rows, tokens)
        numbers = numbers.repeat(rows // num_rows, 1)  # rows may all have these documents
        counts = [
            len(row[is_real].unique()) for row, is_real in zip(numbers, real.cpu(), strict=True)
        ]
        if max(counts) > 1:
            raise MeshAttentionError(
                f"row {counts.index(max(counts))} of the batch has {max(counts)} documents, and a "
                "head for sequences reads one token of a row: give each document a row of its own, "
                "padded, with an attention_mask"
            )

    def _balance(self, router_logits: Sequence[Tensor], top_k: int, documents: Documents) -> Tensor:
        """`load_balancing_loss_func` of transformers, over all tokens of all ranks but padding."""
        padding = documents.padding
        if padding is None:
            padding = documents.shards.padding("q", None)
        real = ~padding.to(router_logits[0].device, non_blocking=True)
        experts = router_logits[0].shape[-1]
        num_rows = router_logits[0].numel() // experts // real.shape[-1]
        weights = real.expand(num_rows, -1).reshape(-1, 1).to(torch.float32)
        own = selected = torch.zeros(experts, device=weights.device)
        for logits in router_logits:
            chances = logits.reshape(-1, experts).softmax(-1)
            chosen = torch.zeros_like(chances).scatter_(1, chances.topk(top_k, -1).indices, 1.0)
            own = own + (chances * weights).sum(0)
            selected = selected + (chosen * weights).sum(0)
        return _balanced(self._cp, self._reduce, own, selected, weights.sum() * len(router_logits))


@collective_call(of_object)
def _balanced(
    cp: ContextParallel, reduce: Reduce, own: Tensor, selected: Tensor, count: Tensor
) -> Tensor:
    """The loss from this rank's sums for each expert: of its chances (`own`), and of how often it
    was selected; and the count of both. Gradients flow through `own` alone."""
    experts = len(own)
    sums = torch.cat([own.detach(), selected, count[None]]).double()
    means = Means("router loss", cp._calls, reduce, None, None, None, None)
    means.add_up({"experts": experts}, sums)
    chances, selected, count = sums[:experts], sums[experts:-1], sums[-1]
    value = (experts * (selected / count * chances / count).sum()).to(own.dtype)
    share = experts * (selected / count * own / count).sum()
    share = share * (1 if reduce == "sum" else len(cp._calls.ranks))
    return value + (share - share.detach()).to(own.dtype)
