"""What a model makes of all its tokens, put right over ranks: the token that a head for sequences
reads, and the loss that balances experts.

Models compute both from the tokens of this rank. Hooks behind them put what all ranks have in their
place, with gradients for what becomes of them (`reduce`).
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from typing import Any, get_args

import torch
from torch import Tensor, nn

from mesh_attention.api.context_parallel import ContextParallel
from mesh_attention.errors import MeshAttentionError
from mesh_attention.runtime.session.collective_call import collective_call, of_object
from mesh_attention.runtime.session.documents import Documents
from mesh_attention.runtime.session.sharding import Grad
from mesh_attention.train.means import Means, Reduce


def pools(model: nn.Module) -> bool:
    """Whether it is a head of transformers that reads the last token of each row."""
    return any(base.__name__ == "GenericForSequenceClassification" for base in type(model).__mro__)


def refuse_unreduced(model: Any, reduce: Any) -> None:
    if reduce is not None and reduce not in get_args(Reduce):
        raise MeshAttentionError(
            f"reduce={reduce!r}: must be one of {', '.join(get_args(Reduce))}, or left out"
        )
    if pools(model) and reduce is None:
        raise MeshAttentionError(
            f"{type(model).__name__} reads one token of each row, which all ranks then have: say "
            "reduce='ddp' or 'fsdp', whichever averages gradients over the ranks, or 'sum' if you "
            "add them up"
        )


def fault_of_router(model: Any, reduce: Any) -> str | None:
    """Why the loss that balances experts cannot be had."""
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
    """The hooks of one model. Copies of the model share them."""

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
        """(rows, labels): of the last token that is no padding, as transformers find it."""
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
        """All ranks have the same rows here. The host waits for a device where there is padding."""
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
        """As `load_balancing_loss_func` over all tokens of all ranks, but padding."""
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
    """Gradients flow through `own` alone: sums of the chances of each expert."""
    experts = len(own)
    sums = torch.cat([own.detach(), selected, count[None]]).double()
    means = Means("router loss", *cp._loss_fields(reduce, None, None), None, None)
    means.add_up({"experts": experts}, sums)
    chances, selected, count = sums[:experts], sums[experts:-1], sums[-1]
    value = (experts * (selected / count * chances / count).sum()).to(own.dtype)
    share = experts * (selected / count * own / count).sum()
    share = share * (1 if reduce == "sum" else len(cp._calls.ranks))
    return value + (share - share.detach()).to(own.dtype)
