"""Checks for targets whose loss would be wrong in silence: those of other tokens than the logits or
hidden states that come with them.

Labels of `shard_batch` are the next tokens: a loop for a single process shifts them once more.
What `shard` and `shard_batch` cut is known, and so are its views. Of copies nothing is known: they
are compared with labels that were cut, on the CPU, where nobody waits for it. The autograd graph of
the logits shows which attention they come from, and whether a token was dropped.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Literal

import torch
from torch import Tensor

from mesh_attention.errors import MeshAttentionError
from mesh_attention.plan.problem.layout import Layout
from mesh_attention.request.autograd import Attention
from mesh_attention.runtime.session.layouts import KNOWN_LAYOUTS, same_rows
from mesh_attention.train.means import LossCall
from mesh_attention.train.whole_batch import FEWEST_LABELS, batch_of, note_on

_End = Literal["first", "last"]
# Nodes of an autograd graph that only copy or reshape, and how many nodes a search visits.
_COPIES = ("ViewBackward0", "UnsafeViewBackward0", "CloneBackward0", "ToCopyBackward0")
_MOST_COPIES = 8  # to find the slice before them
_MOST_NODES = 256  # to find attention: the last one of a model is some dozens of nodes from its end


def refuse_other_tokens(name: str, x: Tensor, targets: Tensor, call: LossCall) -> None:
    """Raises if `targets` are those of other tokens than `x`, which errors call `name`."""
    if note_on(targets).name == "input_ids" and call.calls.is_causal:
        raise MeshAttentionError(
            "targets are input_ids of shard_batch, each token its own target: take batch.labels, "
            "which are the next tokens (give shard_batch labels=input_ids), or "
            "input_ids.clone() if you mean these"
        )
    if _is_shifted_again(x, targets, call):
        raise MeshAttentionError(
            f"{name} and targets are shifted on this rank, as by {name}[:, :-1] and labels[:, 1:]: "
            "labels of shard_batch are the next tokens already, so give the loss all of both, "
            f"{name} and batch.labels; where a token shall not count, set its target to "
            "ignore_index"
        )
    _refuse_other_attention(name, x, targets, call)


def layout_of(x: Tensor, call: LossCall) -> Layout | None:
    """How a tensor lies on the ranks of a call, if it was cut for them."""
    layout, ranks, _ = KNOWN_LAYOUTS.of(x) or (None, (), 0)
    return layout if ranks == call.user.session.groups.ranks else None


def _is_shifted_again(x: Tensor, targets: Tensor, call: LossCall) -> bool:
    whole = targets if targets._base is None else targets._base
    is_cut = batch_of(whole) is not None or layout_of(whole, call) is not None
    if is_cut and targets.numel() == whole.shape[:2].numel():
        return False  # all of what was cut
    is_shared_out = len(call.user.session.groups.ranks) > 1
    if call.batch is None and not is_shared_out:
        return False
    dropped, dropped_of_x = _dropped(targets), _dropped(x)
    for cut in list(call.user.session.labels):
        how = _how_moved(targets, cut())
        if how == "again":
            return True
        if how == "first":
            dropped, is_cut = "first", True
    if is_cut and dropped == "first":
        return dropped_of_x != "first"
    return dropped_of_x == "last" and dropped != "last"


def _how_moved(targets: Tensor, labels: Tensor | None) -> Literal["first", "again"] | None:
    """How targets, which may be copies, were made of these labels: without the first token, or all
    of them, moved by a token, as by `roll` or `F.pad`. Neither is read on a device."""
    ignored = note_on(labels).ignore_index
    if labels is None or labels.ndim != 2 or labels.device.type != "cpu" or ignored is None:
        return None
    rows, tokens = labels.shape
    is_all = targets.numel() == rows * tokens
    if targets.device != labels.device or not (is_all or targets.numel() == rows * (tokens - 1)):
        return None
    valid, labels = labels != ignored, labels.long()
    targets = targets.reshape(rows, -1).long()
    if int(valid.sum()) < FEWEST_LABELS or not torch.equal(targets[:, : tokens - 1], labels[:, 1:]):
        return None
    if torch.equal(targets, labels[:, : targets.shape[1]]):  # all alike, so nothing is known
        return None
    if is_all:
        end = targets[:, -1]
        return "again" if bool(((end == labels[:, 0]) | (end == ignored)).all()) else None
    return "first" if bool(valid[:, 0].any()) else None  # what has no target may go


def _dropped(x: Tensor) -> _End | None:
    """Which token of each row of a tensor (batch, tokens, ...) was cut off before `x`, if either
    was: `x` is a view, or the graph shows it. Only copies may come after the cut."""
    whole = x._base
    if whole is not None and whole.ndim > 1:
        skipped = x.storage_offset() - whole.storage_offset()
        if x.numel() == whole.numel() - whole[:, :1].numel() and skipped in (0, whole.stride(1)):
            return "first" if skipped else "last"
    node: Any = x.grad_fn
    for _ in range(_MOST_COPIES):
        name = "" if node is None else node.name()
        if name == "SliceBackward0":
            sizes, dim = node._saved_self_sym_sizes, node._saved_dim
            # A number before the end is saved without sign, and the end itself may be any.
            start, end = node._saved_start, node._saved_end
            if len(sizes) > 2 and dim == len(sizes) - 2:
                if start == 0 and end in (sizes[dim] - 1, -1, 2**64 - 1):
                    return "last"
                if start == 1 and sizes[dim] <= end < 2**64 - sizes[dim]:
                    return "first"
        elif name not in _COPIES:
            return None
        node = node.next_functions[0][0]
    return None


def _refuse_other_attention(name: str, x: Tensor, targets: Tensor, call: LossCall) -> None:
    """Raises if `x` comes from attention over another batch than the targets, or if tokens lie
    otherwise there. The attention is searched for in the autograd graph of `x`; it knows its batch
    if its call had documents."""
    cut, nodes, num_seen = layout_of(targets, call), deque([x.grad_fn]), 0
    while (call.batch or cut) is not None and nodes and num_seen < _MOST_NODES:
        node: Any = nodes.popleft()
        num_seen += 1
        is_attention = getattr(node, "_forward_cls", None) is Attention
        if is_attention and cut is not None:
            layout = None if node.prepared is None else node.prepared.layout
            if layout is not None and layout.slots == cut.slots and not same_rows(cut, layout):
                raise MeshAttentionError(
                    f"targets lie in the {cut.kind} layout of {cut.num_tokens} tokens, and {name} "
                    f"comes from attention over {layout.num_tokens} tokens in the {layout.kind} "
                    "layout: cut them by the same object, with the same documents="
                )
            cut = None  # this was the last attention; others may be of other tokens
        documents = node.documents if is_attention else None
        batch = None if documents is None or call.batch is None else documents.plans.batch
        if batch not in (None, call.batch):
            raise MeshAttentionError(
                f"targets are those of another batch than {name}, which comes from attention over "
                "the documents of another shard_batch; give the labels of that, or labels.clone() "
                "if you mean these"
            )
        if batch is not None:
            return
        nodes.extend(earlier for earlier, _ in getattr(node, "next_functions", ()) if earlier)
