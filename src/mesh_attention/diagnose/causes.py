"""Names the most likely cause of differing numbers, for `doctor.py`. Nothing here runs a model.

The first tensor that differs says most: all tensors before it are right. Each common mistake leaves
its own trace there. Each function looks for the traces of a few mistakes and returns their cause,
or None where it sees none.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from mesh_attention.diagnose.compare import Activations, ComparedGradients
from mesh_attention.diagnose.report import Cause, Limits


def of_heads(where: str | None) -> Cause | None:
    """`where`: the module whose attention got heads before tokens, as the recorder saw it."""
    if where is None:
        return None
    return Cause(
        "heads first",
        f"attention of {where} is called with (batch, heads, tokens, head_dim), and takes (batch, "
        "tokens, heads, head_dim): give x.transpose(1, 2) of q, k and v",
        where,
    )


def of_activations(
    seen: Activations, model: nn.Module, of_pytorch: str | None = None
) -> Cause | None:
    """The cause if what modules compute differs. `of_pytorch`: the module, if any, in which ranks
    call PyTorch's attention."""
    name = seen.first
    if name is None or seen.shards is None:
        return None
    module, _, part = name.partition(", call ")[0].partition(": ")
    way = _other_way(seen, name)
    if name == next(iter(seen.errors)) and way not in (None, _COUNTED):
        return Cause(
            "layout",
            f"tokens lie in {way} shards, and attention takes them for the "
            f"{seen.shards.q_layout.kind} layout: they differ from the first module on, {module}; "
            "cut them by shard or shard_batch of the object, or say layout= or relayout=True to it",
            module,
        )
    k, v = (name.replace(": q of", f": {x} of") for x in "kv")
    is_rotated = ": q of" in name and seen.is_wrong(k) and not seen.is_wrong(v)
    if way == _COUNTED or is_rotated:
        what = "positions are counted from 0 on each rank"
        if way != _COUNTED:
            what = "q and k of attention differ and v does not: positions are not those of tokens"
        return Cause(
            "positions",
            f"{what}, first in {module}. RoPE and position embeddings of a rank need the positions "
            "of its tokens in the whole: hand batch.position_ids, or cp.positions(), on to the "
            "model",
            module,
        )
    attention = _attention_before(seen, name)
    if attention is not None:
        return _of_attention(seen, name, attention, of_pytorch)
    names = list(seen.errors)
    modules = dict(model.named_modules())
    if name == names[0] or isinstance(modules.get(module), nn.Embedding):
        return Cause(
            "batches",
            f"{module} gives other numbers on ranks {seen.wrong_ranks(name)} of the group, and all "
            "before are equal: its tokens or positions are not those of the batch, in another "
            "order or changed after they were cut",
            module,
        )
    before = names[names.index(name) - 1].partition(": ")[0]
    where = module.rpartition(".")[0] or type(model).__name__ if part == "input" else module
    after = f" after {before}" if before.startswith(f"{where}.") else ""
    return Cause(
        "token mixing",
        f"{where} gives other numbers{after}, on ranks {seen.wrong_ranks(name)} of the group, "
        "though all before are equal: it mixes tokens outside of attention (a convolution, a mean, "
        "a recurrence, a router), of which the others are on other ranks, or depends on the rank. "
        "Give it all tokens: cp.unshard and cp.shard around it",
        where,
    )


_COUNTED = "counted from 0 on each rank"
_RESULT = ": result of attention"


def _other_way(seen: Activations, name: str) -> str | None:
    """The way to cut sequences, other than the object's, by which these numbers would be right."""
    for way, positions in seen.other_positions():
        errors = seen.errors_if(name, positions)
        if errors is not None and not bool((errors > seen.limits[name]).any()):
            return way
    return None


def _attention_before(seen: Activations, name: str) -> str | None:
    """The module whose attention made the first tensor that differs. That is the attention's result
    itself; or the attention lies before it and after the last equal tensor, and has no compared
    result, since the recorder did not see the attention of one process."""
    if _RESULT in name:
        return name.partition(": ")[0]
    attention = None
    for other in seen.ranks[0]:
        if other == name:
            return attention
        if _RESULT in other and other not in seen.errors:
            attention = other.partition(": ")[0]
        elif other in seen.errors:
            attention = None
    return None


def _of_attention(seen: Activations, name: str, where: str, of_pytorch: str | None) -> Cause:
    """The cause if q, k and v of attention are equal and its result is not."""
    assert seen.shards is not None
    starts, wrong = seen.shards.starts[0], seen.wrong_tokens(name)
    inputs = f"attention of {where}: its q, k and v are equal, and its result is not"
    if of_pytorch == where:
        return Cause(
            "attention",
            f"attention of {where} is PyTorch's, which sees the tokens of this rank alone: call "
            "attention of the object, or open its context_parallel() around the model",
            where,
        )
    if len(starts) > 2 and not bool(wrong[:, : starts[1]].any()):
        return Cause(
            "documents",
            f"{inputs}, but for the first document: tokens see those of other documents; call "
            "attention(..., documents=batch.documents), of the same object",
            where,
        )
    return Cause(
        "attention",
        f"{inputs}: its mask, window, scale, softcap or documents are not those of the one "
        "process; ContextParallel(...) says them once for all calls",
        where,
    )


def of_randomness(where: str) -> Cause:
    """The cause if two runs on ranks with different seeds differ."""
    return Cause(
        "randomness",
        f"{where} draws random numbers or is given some (dropout that is not PyTorch's, noise, "
        "masked tokens), so ranks and one process cannot be equal, and ranks of one seed draw the "
        "same for other tokens: leave them out to compare; to train, seed ranks differently, or "
        "draw for whole batches before they are cut",
        where,
    )


def of_parameters(names: list[str], ranks: list[int]) -> Cause:
    """The cause if parameters differ between ranks, or modules are in different modes."""
    return Cause(
        "parameters",
        f"{names[0]} of rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} is not that of "
        f"rank 0, and so are {len(names) - 1} others: seed all ranks alike before the model is "
        "made, load the same checkpoint on all, or let DDP or FSDP2 send what rank 0 has; train, "
        "freeze or evaluate it on all ranks",
        names[0],
    )


Sums = dict[int, tuple[float, float]]  # by shift of labels: sum of losses, number of targets


def sums_of_labels(logits: Tensor | None, labels: Any) -> Sums:
    """Sums of the loss if the labels were shifted by 0, 1 or 2 more tokens."""
    if not isinstance(logits, Tensor) or not isinstance(labels, Tensor):
        return {}
    if labels.shape != logits.shape[:2] or int(labels.max()) >= logits.shape[2]:
        return {}
    sums = {}
    for shift in range(min(3, labels.shape[1])):
        flat = labels[:, shift:].flatten().long().to(logits.device)
        rows = logits[:, : labels.shape[1] - shift].flatten(0, 1).double()
        total = cross_entropy(rows, flat, reduction="sum")
        sums[shift] = float(total), float((flat != -100).sum())
    return sums


def of_loss(loss: float, targets: list[Sums], labels: Sums, tol: float) -> Cause:
    """The cause if only the loss is wrong. `targets`: sums of each rank, by labels that are shifted
    already; `labels`: sums of one process, by labels that are not."""

    def is_loss(value: float) -> bool:
        return abs(value - loss) <= tol * abs(loss)

    def means(shift: int) -> list[float]:
        """The mean over all targets, and the mean of the ranks' means."""
        sums = [rank[shift] for rank in targets if shift in rank]
        if len(sums) < len(targets):
            return []
        total, count = np.sum(sums, 0)
        own = [s / n for s, n in sums if n]
        return [total / max(count, 1), float(np.mean(own)) if own else 0.0]

    whole = {shift: total / max(count, 1) for shift, (total, count) in labels.items()}
    if any(map(is_loss, means(1))) or is_loss(whole.get(2, torch.nan)):
        words = (
            "labels are shifted twice: those of shard_batch are targets already. Call the loss on "
            "them as they are, and no model that shifts labels; labels that are next tokens before "
            "they are cut want shard_batch(..., shift_labels=False)"
        )
        return Cause("labels", words)
    if is_loss(whole.get(0, torch.nan)):
        words = "labels are not shifted: each token predicts itself; shard_batch shifts them"
        return Cause("labels", words)
    if any(map(is_loss, means(0)[1:])):
        words = (
            "the loss is the mean of the ranks' own means, and they have different numbers of "
            "targets: take cp.cross_entropy(logits, batch.labels, reduce=...)"
        )
        return Cause("loss", words)
    return Cause(
        "loss",
        "all modules give the numbers of one process, and the loss does not: look at labels, "
        "ignore_index and how losses of ranks become a mean; cp.cross_entropy(logits, "
        "batch.labels, ...) is that over all targets",
    )


def of_gradients(
    ours: ComparedGradients,
    apart: dict[str, ComparedGradients],
    limits: Limits,
    size: int,
    by_hand: list[float] | None,
) -> Cause | None:
    """The cause if gradients differ. `apart`: the sum and the mean over ranks, where no framework
    reduces gradients. `by_hand`: the factor by which each rank multiplied its gradients before the
    caller reduced them, empty if there is none; None where the caller does not reduce them."""
    wrong, tol = limits.exceeded(ours.errors), limits.least
    if not wrong:
        return None
    way = next((way for way, x in apart.items() if not limits.exceeded(x.errors)), None)
    if way is not None and by_hand is None:
        return Cause(
            "gradients not reduced",
            f"each rank has the gradient of its own tokens, and only their {way} is that of one "
            "process: wrap the model by DDP or FSDP2 with reduce='ddp' or 'fsdp', or add up "
            "gradients with reduce='sum' and tell doctor by reduce_gradients=",
            wrong[0],
        )
    factors = {name: ours.factors[name] for name in wrong}
    first = factors[wrong[0]]
    if first is not None and all(
        x is not None and abs(x - first) <= limits[name] * first for name, x in factors.items()
    ):
        named = {size: f"{size} (the ranks)", 1 / size: f"1/{size} (one over the ranks)"}
        factor = next((w for x, w in named.items() if abs(x - first) <= tol * x), None)
        ways = "they are added up" if first > 1 else "they are averaged"
        why = f"{ways}, and the loss is scaled for another way" if factor else "the loss is scaled"
        return Cause(
            "gradient scale",
            f"gradients of {len(wrong)} of {len(ours.errors)} parameters are "
            f"{factor or f'{first:.3g}'} times those of one process, and else right: {why}. "
            "reduce='ddp' or 'fsdp' is for gradients that are averaged over all ranks, 'sum' for "
            "those that are added up, and unshard(..., grad=) for a loss on whole tensors",
            wrong[0],
        )
    if way is not None and by_hand:
        numbers = ", ".join(f"{value:.3g}" for value in by_hand)
        return Cause(
            "clipping",
            f"reduce_gradients multiplies the gradients of ranks by {numbers} before it "
            "reduces them, as clip_grad_norm_ does: clip after that, by the norm of one process",
            wrong[0],
        )
    if way is not None:
        return Cause(
            "gradients",
            f"the {way} of the ranks' gradients is that of one process, and what reduce_gradients "
            f"makes of them is not, first {wrong[0]}: it clips before it reduces, leaves some out "
            "or reduces them twice",
            wrong[0],
        )
    return Cause(
        "gradients",
        f"the forward pass is right, and gradients of {len(wrong)} of {len(ours.errors)} "
        f"parameters are not, first {wrong[0]}: look at what is detached, clipped before it is "
        "reduced, reduced twice or not at all on the way back",
        wrong[0],
    )
