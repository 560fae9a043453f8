"""From numbers that differ to what is most likely wrong, in words.

The first tensor that differs says most: everything before it was right. Each mistake that people
make leaves its own trace there, which is looked for by name.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from mesh_attention.diagnose.compare import Activations, ComparedGradients
from mesh_attention.diagnose.report import Cause


def of_heads(where: str | None) -> Cause | None:
    if where is None:
        return None
    return Cause(
        "heads first",
        f"attention of {where} is called with (batch, heads, tokens, head_dim), and takes (batch, "
        "tokens, heads, head_dim): give x.transpose(1, 2) of q, k and v",
        where,
    )


def of_activations(seen: Activations, model: nn.Module) -> Cause | None:
    name = seen.first
    if name is None or seen.shards is None:
        return None
    where = name.partition(": ")[0].partition(", call ")[0]
    way = _other_way(seen, name)
    if name == next(iter(seen.errors)) and way not in (None, _COUNTED):
        return Cause(
            "layout",
            f"tokens lie in {way} shards, and attention takes them for the "
            f"{seen.shards.q_layout.kind} layout: they differ from the first module on, {where}; "
            "cut them by shard or shard_batch of the object, or say layout= or relayout=True to it",
            where,
        )
    same_v = seen.errors.get(name.replace(": q of", ": v of").replace(": k of", ": v of"))
    is_rotated = ": q of" in name or ": k of" in name
    if way == _COUNTED or (is_rotated and same_v is not None and not seen.is_wrong(same_v).any()):
        what = "positions are counted from 0 on each rank"
        if way != _COUNTED:
            what = "q and k of attention differ and v does not: positions are not those of tokens"
        return Cause(
            "positions",
            f"{what}, first in {where}. RoPE and position embeddings of a rank need the positions "
            "of its tokens in the whole: hand batch.position_ids, or cp.positions(), on to the "
            "model",
            where,
        )
    wrong = seen.is_wrong(seen.errors[name])
    inside = [x.partition(": ")[0] for x in seen.ranks[0] if ": " in x]
    if any(x == where or x.startswith(f"{where}.") for x in inside):
        return _of_attention(seen.shards.starts[0], wrong, where)
    convolves = any(
        isinstance(x, nn.Conv1d) and x.kernel_size[0] > 1
        for x in dict(model.named_modules()).get(where, model).modules()
    )
    reach = _behind_edges(seen, wrong)
    if reach is None and not convolves:
        words = "gives other numbers though all before it are equal: it mixes tokens outside of "
        words += "attention (a mean, a recurrence, a router over tokens) or depends on the rank"
    else:
        words = "looks at neighbouring tokens, and at a shard's edge these are on another rank"
        words += f": the first {reach} tokens of stretches on a rank are wrong" if reach else ""
        words += ". Give it all tokens (cp.unshard and cp.shard around it), or those before edges"
    return Cause("token mixing", f"{where} {words}", where)


_COUNTED = "counted from 0 on each rank"


def _other_way(seen: Activations, name: str) -> str | None:
    for way, positions in seen.other_positions():
        errors = seen.errors_if(name, positions)
        if errors is not None and not seen.is_wrong(errors).any():
            return way
    return None


def _of_attention(starts: tuple[int, ...], wrong: Tensor, where: str) -> Cause:
    inputs = f"attention of {where}: its q, k and v are equal, and its result is not"
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


def _behind_edges(seen: Activations, wrong: Tensor) -> int | None:
    """Wrong tokens are the first few of each stretch of tokens on a rank, or the last few: how
    many; None where others are wrong too."""
    tokens = wrong.any(0).numpy()
    for step in (1, -1):
        reach, longest = 0, 0
        for positions in seen.positions():
            inside = positions[positions < len(tokens)][::step]
            ends = np.flatnonzero(np.diff(inside) != step) + 1
            for stretch in np.split(inside, ends):
                at = np.flatnonzero(tokens[stretch])
                reach = max(reach, int(at[-1]) + 1 if len(at) else 0)
                longest = max(longest, len(stretch))
        if 0 < reach <= longest // 2:
            return reach
    return None


def of_randomness(
    first: dict[str, Tensor], second: dict[str, Tensor], limit: float
) -> Cause | None:
    """Of two runs on ranks with different seeds."""
    for name, x in first.items():
        other = second.get(name)
        if other is not None and float((x - other).abs().max()) > limit * float(x.abs().max()):
            where = name.partition(": ")[0]
            return Cause(
                "randomness",
                f"{where} draws random numbers (dropout that is not PyTorch's, noise), so ranks "
                "and one process cannot be equal, and ranks of one seed draw the same for other "
                "tokens: set it to 0 to compare, and seed ranks differently to train",
                where,
            )
    return None


Sums = dict[int, tuple[float, float]]  # of losses and of targets, by the tokens of a shift


def sums_of_labels(logits: Tensor | None, labels: Any) -> Sums:
    """Were labels shifted once more, and further."""
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
    """All modules are right, and the loss is not. `targets`: of each rank, which are shifted
    already; `labels`: of one process, which are not."""

    def is_loss(value: float) -> bool:
        return abs(value - loss) <= tol * abs(loss)

    def means(shift: int) -> list[float]:
        """Over all targets, and of the means of ranks."""
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
    ours: ComparedGradients, apart: ComparedGradients | None, tol: float, size: int
) -> Cause | None:
    """`apart`: those of ranks, were they added up over them; None where a framework does it."""
    wrong = [name for name, error in ours.errors.items() if error > tol]
    if not wrong:
        return None
    if apart is not None and all(error <= tol for error in apart.errors.values()):
        return Cause(
            "gradients not reduced",
            "each rank has the gradient of its own tokens, and only their sum is that of one "
            "process: wrap the model by DDP or FSDP2 with reduce='ddp' or 'fsdp', or add up "
            "gradients with reduce='sum' and tell doctor by reduce_gradients=",
            wrong[0],
        )
    factors = [ours.factors[name] for name in wrong]
    first = factors[0]
    if first is not None and all(x is not None and abs(x - first) <= tol * first for x in factors):
        named = {size: f"{size} (the ranks)", 1 / size: f"1/{size} (one over the ranks)"}
        factor = next((w for x, w in named.items() if abs(x - first) <= tol * x), f"{first:.6g}")
        ways = "they are added up" if first > 1 else "they are averaged"
        return Cause(
            "gradient scale",
            f"gradients of {len(wrong)} of {len(ours.errors)} parameters are {factor} times those "
            f"of one process, and else right: {ways}, and the loss is scaled for another way. "
            "reduce='ddp' or 'fsdp' is for gradients that are averaged over all ranks, 'sum' for "
            "those that are added up, and unshard(..., grad=) for a loss on whole tensors",
            wrong[0],
        )
    return Cause(
        "gradients",
        f"the forward pass is right, and gradients of {len(wrong)} of {len(ours.errors)} "
        f"parameters are not, first {wrong[0]}: look at what is detached, reduced twice or not at "
        "all on the way back",
        wrong[0],
    )
