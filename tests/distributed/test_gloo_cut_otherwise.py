"""Calls that are kept and then made on tensors that were cut otherwise: refused on all ranks, if
the call does not say how; and programs that mean it are right and stay fast."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from threading import Thread
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from mesh_attention import ContextParallel, mesh_attention
from mesh_attention.request.object_calls import ObjectCalls
from support.pool import WorkerPool
from support.training import refusal

TOKENS, STARTS = 64, [0, 10, 25, 64]


def whole(tokens: int = TOKENS) -> Tensor:
    return torch.randn(1, tokens, 4, 8, generator=torch.Generator().manual_seed(tokens))


def kept(cp: ContextParallel, x: Tensor) -> None:
    """A plain call, warm."""
    for _ in range(2):
        cp.attention(x, x, x)


def fixed(rank: int) -> tuple[ContextParallel, Tensor]:
    cp = ContextParallel(seq_len=TOKENS, causal=True)
    kept(cp, cp.shard(whole(), 1))
    return cp, cp.shard(whole(), 1, documents=cp.documents(STARTS))


def beside_an_object_of_plain_batches(rank: int) -> tuple[ContextParallel, Tensor]:
    plain, cp = (ContextParallel(seq_len=TOKENS, causal=True) for _ in range(2))
    for context in plain, cp:
        kept(context, context.shard(whole(), 1))
    return cp, cp.shard(whole(), 1, documents=cp.documents(STARTS))


def before_another_cuts_plain_batches(rank: int) -> tuple[ContextParallel, Tensor]:
    cp, x = fixed(rank)
    ContextParallel(seq_len=TOKENS, causal=True).shard(whole(), 1)
    return cp, x


def by_another_object(rank: int) -> tuple[ContextParallel, Tensor]:
    cp = ContextParallel(causal=True)
    local = ContextParallel(causal=True, window_size=(9, 0))
    for context in local, cp:
        kept(context, context.shard(whole(), 1, documents=context.documents([0, TOKENS])))
    return local, cp.shard(whole(), 1, documents=cp.documents(STARTS, also=[local]))


def padding(rank: int) -> tuple[ContextParallel, Tensor]:
    cp = ContextParallel(causal=False, layout="contiguous")
    kept(cp, cp.shard(whole(), 1, documents=cp.documents([0, TOKENS])))
    return cp, cp.shard(whole(63), 1, documents=cp.documents([0, 63]))


def padding_of_a_fixed_object(rank: int) -> tuple[ContextParallel, Tensor]:
    cp = ContextParallel(seq_len=TOKENS, causal=False)
    kept(cp, cp.shard(whole(), 1))
    return cp, cp.shard(whole(63), 1, documents=cp.documents([0, 63]))


def layout(rank: int) -> tuple[ContextParallel, Tensor]:
    cp, other = ContextParallel(causal=True), ContextParallel(causal=True, layout="contiguous")
    kept(cp, cp.shard(whole(), 1, documents=cp.documents([0, TOKENS])))
    return cp, cp.shard(whole(), 1, documents=cp.documents([0, TOKENS], also=[other]))


def heads_first(rank: int) -> tuple[ContextParallel, Tensor]:
    cp = ContextParallel(causal=False)
    kept(cp, torch.randn(1, 4, 32, 8))  # few queries of many heads
    return cp, cp.shard(whole(), 1, documents=cp.documents([0, TOKENS])).transpose(1, 2)


def never_cut(rank: int) -> tuple[ContextParallel, Tensor]:
    cp = ContextParallel(causal=True)
    kept(cp, torch.randn(1, TOKENS, 4, 8))  # of twice as many tokens
    cp.shard(whole(), 1, documents=cp.documents([0, TOKENS]))
    return cp, whole()


def otherwise(rank: int, world_size: int, make: Callable[..., Any]) -> tuple[str, str]:
    torch.manual_seed(rank)
    cp, x = make(rank)
    refused = refusal(lambda: cp.attention(x, x, x))
    # It holds for later calls too, and what is right still works.
    again = refusal(lambda: cp.attention(x, x, x))
    assert again == refused
    documents = cp.documents(STARTS)
    own = cp.shard(whole(), 1, documents=documents)
    return refused, refusal(lambda: cp.attention(own, own, own, documents=documents))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (fixed, "were cut by documents"),
        (beside_an_object_of_plain_batches, "were cut by documents"),
        (before_another_cuts_plain_batches, "were cut by documents"),
        (by_another_object, "were cut by documents"),
        (padding, "from 63 tokens"),
        (padding_of_a_fixed_object, "from 63 tokens"),
        (layout, "in the contiguous layout"),
        (heads_first, "looks like (batch, heads, local_seq, head_dim)"),
        (never_cut, "so that a rank has fewer"),
    ],
)
def test_a_kept_call_is_refused_on_tensors_that_were_cut_otherwise(
    pool: WorkerPool, make: Callable[..., Any], words: str
) -> None:
    for refused, afterwards in pool.run(otherwise, 2, make):
        assert words in refused
        assert afterwards == "nothing"


def apart(x: Tensor, out: Any, starts: list[int], *, causal: bool = True) -> float:
    q = x.double().transpose(1, 2)
    parts = [q[:, :, a:b] for a, b in pairwise(starts)]
    truth = [scaled_dot_product_attention(x, x, x, is_causal=causal) for x in parts]
    return float((out - torch.cat(truth, 2).transpose(1, 2)).abs().max())


def meant(rank: int, world_size: int) -> tuple[list[float], list[int]]:
    """Three steps of a right program: how far results are off, and how many calls without documents
    are prepared in each step."""
    cp, single = (ContextParallel(seq_len=TOKENS, causal=True) for _ in range(2))
    contiguous = ContextParallel(seq_len=TOKENS, causal=True, relayout=True)
    full = ContextParallel(seq_len=TOKENS, causal=False)
    documents, whole_batch = cp.documents(STARTS), full.documents([0, TOKENS])
    x, errors, prepared = whole(), [], []

    def plain(on: ContextParallel, y: Tensor) -> None:
        out: Any = on.attention(y, y, y)
        errors.append(apart(x, on.unshard(out, 1), [0, TOKENS]))

    def packed(y: Tensor) -> None:
        out: Any = cp.attention(y, y, y, documents=documents)
        errors.append(apart(x, cp.unshard(out, 1, documents=documents), STARTS))

    def cut_packed() -> Tensor:
        return cp.shard(x, 1, documents=documents)

    def step() -> None:
        packed(cut_packed())
        plain(cp, cp.shard(x, 1))  # evaluation
        y, z = single.shard(x, 1), cut_packed()
        for _ in range(2):  # layers of both kinds, on two objects
            plain(single, y)
            packed(z)
        y, z = cp.shard(x, 1), cut_packed()
        for _ in range(2):  # on one object, where both are cut before
            plain(cp, y)
            packed(z)
        y = cp.shard(x, 1)
        loader = Thread(target=cut_packed)  # a batch ahead
        loader.start()
        loader.join()
        plain(cp, y)
        plain(contiguous, contiguous.shard(x, 1))
        y = full.shard(x, 1, documents=whole_batch)
        out: Any = full.attention(y, y, y)
        out = full.unshard(out, 1, documents=whole_batch)
        errors.append(apart(x, out, [0, TOKENS], causal=False))  # in no order

        y = cp.shard(x, 1).requires_grad_()
        loss = checkpoint(lambda y: cp.attention(y, y, y), y, use_reentrant=False).sum()
        packed(cut_packed())
        loss.backward()  # attends again, after another batch was cut

    original = ObjectCalls.prepare
    for _ in range(3):
        with patch.object(ObjectCalls, "prepare", autospec=True, side_effect=original) as seen:
            step()
        prepared.append(sum(call.args[1].documents is None for call in seen.call_args_list))
    y = cp.shard(x, 1)
    out: Any = mesh_attention(y, y, y, causal=True)
    errors.append(apart(x, cp.unshard(out, 1), [0, TOKENS]))
    return errors, prepared


def test_programs_that_mean_both_are_right_and_find_their_calls_again(pool: WorkerPool) -> None:
    for errors, prepared in pool.run(meant, 2):
        assert max(errors) < 1e-5
        assert prepared[0] > 0
        assert prepared[2] == 0
