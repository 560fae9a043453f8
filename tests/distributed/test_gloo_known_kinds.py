"""Which kinds of call are known is the same on all ranks, whatever one of them chooses alone or has
been told of: a correct program is never refused."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from mesh_attention import ContextParallel, Mask, MeshAttentionError
from mesh_attention.runtime.agreement import handshake
from mesh_attention.runtime.agreement.handshake import DisagreementError
from mesh_attention.runtime.agreement.verdict import OUT_OF_STEP
from support.cases import Case
from support.gloo_case import context
from support.pool import WorkerPool
from support.raised import raised_by
from support.reference import attention

RANKS, ODD = 3, 1
CASE = Case(RANKS, 12, 12, heads=(2, 2), head_dims=(4, 4), mask=Mask(causal=True))


def is_right(cp: ContextParallel, case: Case) -> bool:
    q, k, v, grad_out = case.tensors()
    leaves = [cp.shard(x, 1).requires_grad_() for x in (q, k, v)]
    out = cp.attention(*leaves)
    assert isinstance(out, Tensor)
    grads = torch.autograd.grad(out, leaves, cp.shard(grad_out, 1))
    truth = attention(q, k, v, grad_out, case.mask).named()
    pairs = zip(("out", "grad_q", "grad_k", "grad_v"), (out.detach(), *grads), strict=True)
    return all(torch.allclose(cp.unshard(x, 1), truth[name]) for name, x in pairs)


def chosen_by_one_rank(rank: int, world_size: int) -> list[bool]:
    results = []
    for choice in ({"kernel": "reference"}, {"nvtx": True}, {}):
        with context(CASE), context(CASE, **(choice if rank == ODD else {})) as cp:
            results += [is_right(cp, CASE), is_right(context(CASE), CASE)]
    return results


def test_what_one_rank_chooses_alone_makes_no_other_kind_of_call(pool: WorkerPool) -> None:
    assert pool.run(chosen_by_one_rank, RANKS) == [[True] * 6] * RANKS


def kinds_that_come_and_go(rank: int, world_size: int) -> list[bool]:
    """More kinds than are kept, and mistakes in between."""
    cases = [replace(CASE, batch=n) for n in (1, 2, 3, 4)]
    cp = context(CASE)
    shared = cp._calls.session
    shared.calls._caches[False]._limit = 3
    shared.calls._agreed._limit = 3
    results = [is_right(cp, case) for case in cases[:3]]
    for usual, other in ((0, 1), (1, 2)):
        at = usual if rank == ODD else other
        q, k, v = (cp.shard(x, 1).requires_grad_() for x in cases[at].tensors()[:3])
        try:
            cp.attention(q, k, v)
        except DisagreementError:
            results.append(True)
        try:
            cp.unshard(q.detach(), 1)
        except DisagreementError:
            results.append(True)
    for at in (3, 0, 1, 2, 3):
        results.append(is_right(cp, cases[at]))
    if rank == ODD:  # by whatever fault: it asks again, and the others answer
        shared.calls._caches[False].clear()
    results.append(is_right(cp, cases[3]))
    return results


def test_a_mistake_that_was_told_leaves_the_same_kinds_known_on_all_ranks(pool: WorkerPool) -> None:
    assert pool.run(kinds_that_come_and_go, RANKS) == [[True] * 13] * RANKS


def kinds_that_some_know(rank: int, world_size: int) -> tuple[list[str], list[bool], list[str]]:
    """Whoever knows its kind of call waits in it, and the others ask for an agreement."""
    cp = context(CASE, dist.new_group(), seq_len=12)
    x, odd = cp.shard(CASE.tensors()[0], 1), rank == ODD
    cp.attention(x, x, x)
    cp.unshard(x, 1)
    leaf, wide = x.clone().requires_grad_(), torch.cat([x, x])

    def attend(x: Tensor, label: str | None = None) -> object:
        return cp.attention(x, x, x, label=label)

    mistakes: list[Callable[[], object]] = [
        lambda: attend(x if odd else leaf),  # one knows its kind
        lambda: attend(wide if odd else x),  # two know theirs
        lambda: cp.unshard(x, 1, grad="sum" if odd else None),
    ]
    raised, right = [], []
    for mistake in mistakes:
        with mock.patch.object(handshake, "_GRACE_SECONDS", 8.0):  # on a busy machine
            error = raised_by(mistake)
        raised.append(f"{error.kind} {error.error}" if error.seconds < 5 else "late")
        right += [is_right(cp, CASE)]  # kinds that were asked about, and those that were not
        attend(wide)
    skipped = [lambda: attend(x if odd else x.half(), "b" if odd else "a"), lambda: attend(x)]
    with mock.patch.object(handshake, "_GRACE_SECONDS", 8.0):
        return raised, right, [raised_by(call).error for call in skipped]


def test_nothing_is_broken_where_some_ranks_alone_know_their_kind_of_call(pool: WorkerPool) -> None:
    words = ("needs_grad is False there", "batch is 2 there", "grad is 'sum' there")
    for raised, right, (mixed, after) in pool.run(kinds_that_some_know, RANKS):
        for text, word in zip(raised, words, strict=True):
            assert text.startswith("DisagreementError rank 1 of the group [0, 1, 2]"), text
            assert word in text
        assert right == [True] * 3
        assert "label is" in mixed
        assert OUT_OF_STEP in mixed
        assert "out of step since an earlier call" in after


def late_to_a_mistake(rank: int, world_size: int, by: list[int]) -> tuple[str, str, bool]:
    """One rank comes when the others have lost patience; some make a mistake."""
    group = dist.new_group()
    cp = context(CASE, group)
    assert is_right(cp, CASE)
    dist.barrier(group)
    late, x = rank == ODD, cp.shard(CASE.tensors()[0], 1)
    if late:
        time.sleep(1.0)
    dim: Any = None if rank in by else 1
    with mock.patch.object(handshake, "_GRACE_SECONDS", 0.1):
        first = raised_by(lambda: cp.unshard(x, dim))
        right: list[bool] = []
        after = raised_by(lambda: right.append(is_right(cp, CASE)))
    return first.error, after.error, right == [True]


def test_a_rank_that_is_late_to_a_mistake_of_all_leaves_the_group_usable(pool: WorkerPool) -> None:
    for first, after, right in pool.run(late_to_a_mistake, RANKS, [0, 1, 2]):
        assert "a tensor and a dimension" in first
        assert (after, right) == ("", True)


def test_a_rank_that_is_late_and_in_a_call_that_others_broke_off_is_not_taken_for_the_next(
    pool: WorkerPool,
) -> None:
    for rank, (first, after, right) in enumerate(pool.run(late_to_a_mistake, RANKS, [0])):
        assert "a tensor and a dimension" in first, rank
        assert "an earlier call on this process group was broken off" in after
        assert not right


def wrong_after_a_right_call(rank: int, world_size: int) -> dict[str, str]:
    """What a cold call refuses, after calls that were right: a warm call skips their checks."""
    with context(CASE) as cp:
        q, k, v = (cp.shard(x, 1) for x in CASE.tensors()[:3])
        cp.attention(q, k, v)
        cp.attention(q, k, v)
        calls: dict[str, Callable[[], Any]] = {
            "documents of a list": lambda: cp.attention(q, k, v, documents=[0, 4, 12]),  # type: ignore[arg-type]
            "meta": lambda: cp.attention(q.to("meta"), k.to("meta"), v.to("meta")),
            "sparse": lambda: cp.attention(q.to_sparse(), k, v),
            "another dtype": lambda: cp.attention(q, k.float(), v),
            "another length": lambda: cp.attention(q[:, 1:], k, v),
            "no tensor": lambda: cp.attention(None, k, v),  # type: ignore[arg-type]
            "label": lambda: cp.attention(q, k, v, label=1.5),  # type: ignore[arg-type]
            "dropout": lambda: cp.attention(q, k, v, dropout_p=0.1),
            "sinks": lambda: cp.attention(q, k, v, sinks=torch.zeros(3)),
            "sinks of a list": lambda: cp.attention(q, k, v, sinks=[0.0, 0.0]),  # type: ignore[arg-type]
            "vmap": lambda: torch.vmap(lambda x: cp.attention(x, k, v))(q[None]),
        }
        messages = {}
        for name, call in calls.items():
            try:
                messages[name] = str(type(call()))
            except MeshAttentionError as error:
                messages[name] = str(error)
        with torch.device("meta"):  # the library's own tensors are where they belong
            cp.attention(q, k, v)
        assert is_right(cp, CASE)
    try:
        cp.attention(q, k, v)
    except MeshAttentionError as error:
        messages["closed"] = str(error)
    return messages


def test_a_warm_call_hides_no_mistake(pool: WorkerPool) -> None:
    words = {
        "documents of a list": "give what documents(cu_seqlens) returned",
        "meta": "on the meta device",
        "sparse": "must be a dense torch.Tensor",
        "another dtype": "but q is torch.float64",
        "another length": "q has shape",
        "no tensor": "q is NoneType",
        "label": "must be a str or an int",
        "dropout": "dropout of attention weights is not supported",
        "sinks": "one floating-point number for each query head",
        "sinks of a list": "sinks is list; it must be a torch.Tensor",
        "vmap": "torch.func",
        "closed": "is closed",
    }
    for messages in pool.run(wrong_after_a_right_call, RANKS):
        assert {name: words[name] in text for name, text in messages.items()} == dict.fromkeys(
            words, True
        ), messages
