"""What policy losses and heads that predict several tokens need, against one process in float64."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from mesh_attention import ContextParallel, MeshAttentionError
from support.pool import WorkerPool
from support.tiny_gpt import WholeCase
from support.training import ALL, FEW, PACKED, PLAIN, RIGHT, ROWS, refusal, sharded

# Log-probabilities.

STATISTICS = ("is_top1", "mean_logits", "log_sum_sq_probs")
HOW: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunks": {"temperature": 0.7, "softcap": 2.0, "chunk_tokens": 3},
}


def log_probs_of(logits: Tensor, tokens: Tensor, **how: Any) -> tuple[Tensor, Tensor]:
    cap = how.get("softcap")
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    log_probs = (logits / how.get("temperature", 1.0)).log_softmax(-1)
    ignored = tokens == -100
    picked = log_probs.gather(-1, tokens.masked_fill(ignored, 0)[..., None]).squeeze(-1)
    entropy = torch.special.entr(log_probs.exp()).sum(-1)
    return picked.masked_fill(ignored, 0), entropy.masked_fill(ignored, 0)


def statistics_of(logits: Tensor, tokens: Tensor, **how: Any) -> list[Tensor]:
    cap = how.get("softcap")
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    logits = logits / how.get("temperature", 1.0)
    squares = logits.softmax(-1).square().sum(-1).log()
    all_of_them = (logits.argmax(-1) == tokens, logits.mean(-1), squares)
    return [x.masked_fill(tokens == -100, 0) for x in all_of_them]


def policy_tokens(rank: int, world_size: int) -> dict[str, Any]:
    """Logits, hidden states with a head, and logits of which some are out of reach."""
    seen: dict[str, Any] = {}
    chance = torch.Generator().manual_seed(0)
    random = partial(torch.randn, generator=chance, dtype=torch.float64)
    tokens = torch.randint(0, 13, (2, 7), generator=chance)
    tokens[0, 2] = -100
    hidden, weight, bias = (
        x.requires_grad_() for x in (random(2, 7, 5), random(13, 5), random(13))
    )
    logits = random(2, 7, 13).requires_grad_()
    coefficients = random(2, 2, 7)

    def gradients(results: tuple[Tensor, ...], leaves: list[Tensor]) -> list[Tensor]:
        total = sum((c * x).sum() for c, x in zip(coefficients, results, strict=True))
        return [*results, *torch.autograd.grad(total, leaves)]

    with ContextParallel(causal=True) as cp:
        for name, how in HOW.items():
            both = (
                (
                    log_probs_of(logits, tokens, **how),
                    cp.log_probs(logits, tokens, **how),
                    [logits],
                ),
                (
                    log_probs_of(hidden @ weight.T + bias, tokens, **how),
                    cp.log_probs(hidden, tokens, weight=weight, bias=bias, **how),
                    [hidden, weight, bias],
                ),
            )
            for number, (wanted, results, leaves) in enumerate(both):
                pairs = zip(gradients(wanted, leaves), gradients(results, leaves), strict=True)
                seen[f"{name} {number}"] = max((a - b).abs().max().item() for a, b in pairs)
            _, _, *others = cp.log_probs(logits, tokens, statistics=STATISTICS, **how)
            for x, true in zip(others, statistics_of(logits, tokens, **how), strict=True):
                assert not x.requires_grad
                torch.testing.assert_close(x, true)
        rare = logits.detach().clone()
        rare[..., 3:] = -torch.inf
        rare.requires_grad_()
        reachable = torch.where(tokens == -100, tokens, tokens % 3)
        few = rare.detach()[..., :3].clone().requires_grad_()
        pairs = zip(
            gradients(cp.log_probs(rare, reachable), [rare]),
            gradients(log_probs_of(few, reachable), [few]),
            strict=True,
        )
        seen["out of reach"] = max((a[..., :3] - b[..., :3]).abs().max().item() for a, b in pairs)
        seen["refused"] = [
            refusal(lambda: cp.log_probs(logits, tokens, temperature=0)),
            refusal(lambda: cp.log_probs(logits, tokens, bias=bias)),
            refusal(lambda: cp.log_probs(logits, tokens, statistics=["is_top2"])),
            refusal(lambda: cp.log_probs(logits, tokens + 13)),
            refusal(lambda: cp.log_probs(hidden, tokens, weight=weight.T)),
        ]
    return seen


def test_log_probs_and_entropies_have_values_and_gradients_of_whole_logits(
    pool: WorkerPool,
) -> None:
    [seen] = pool.run(policy_tokens, 1)
    words = ["temperature=0: must be finite", "bias without", "['is_top2']: give a list of is_top1"]
    words += ["targets hold", "(vocabulary, 5)"]
    for message, word in zip(seen.pop("refused"), words, strict=True):
        assert word in message
    assert max(seen.values()) < 1e-12, seen


# Means.

WEIGHTS = torch.linspace(-1, 2, 3, dtype=torch.float64)


def features(case: WholeCase) -> Tensor:
    chance = torch.Generator().manual_seed(7)
    return torch.randn(*case.input_ids.shape, 3, generator=chance, dtype=torch.float64)


def true_mean(cases: list[WholeCase], per: str, weights: Tensor) -> Tensor:
    """Over tokens, or over the means of documents, of all batches."""
    means, values = [], []
    for case in cases:
        every, mask = (features(case) @ weights).exp(), case.targets != -100
        values.append(every[mask])
        for row, starts in enumerate(case.documents):
            for a, b in pairwise(starts):
                kept = every[row, a:b][mask[row, a:b]]
                means += [kept.mean()] if len(kept) else []
    return torch.cat(values).mean() if per == "token" else torch.stack(means).mean()


CASES = (PACKED, PLAIN, ROWS, RIGHT, FEW)


def means_of(rank: int, world_size: int, dp: int) -> list[list[float]]:
    """Errors of value and gradient, for each batch and both kinds of mean; one replica has the
    batches in another order."""
    mesh = init_device_mesh("cpu", (dp, world_size // dp), mesh_dim_names=("dp", "cp"))
    place = rank // (world_size // dp)
    errors = []
    with ContextParallel(mesh["cp"], causal=True) as cp:
        for number, case in enumerate(CASES):
            cases = [case, CASES[number - 1]][:dp]
            for per in ("token", "sequence"):
                true = WEIGHTS.clone().requires_grad_()
                wanted = true_mean(cases, per, true)
                [true_grad] = torch.autograd.grad(wanted, true)
                weights = WEIGHTS.clone().requires_grad_()
                batch = sharded(cp, cases[place], x=features(cases[place]))
                assert batch.labels is not None
                mask = batch.labels != -100
                values = torch.where(mask, (batch["x"] @ weights).exp(), torch.nan)
                mean = cp.token_mean(
                    values,
                    mask,
                    per=per,
                    reduce="sum" if dp == 1 else "ddp",
                    data_parallel=mesh["dp"] if dp > 1 else None,
                    documents=batch.documents,
                )
                mean.loss.backward()  # type: ignore[no-untyped-call]
                assert weights.grad is not None
                dist.all_reduce(weights.grad)
                if dp > 1:  # as DDP averages
                    weights.grad /= world_size
                off = (mean.value - wanted).abs().item()
                errors.append([off, (weights.grad - true_grad).abs().max().item()])
    return errors


@pytest.mark.parametrize(("ranks", "dp"), [(3, 1), (4, 2)])
def test_means_over_tokens_and_sequences_are_those_of_one_process(
    pool: WorkerPool, ranks: int, dp: int
) -> None:
    for errors in pool.run(means_of, ranks, dp):
        assert max(map(max, errors)) < 1e-12, errors


def refused_means(rank: int, world_size: int) -> list[str]:
    with ContextParallel(causal=True) as cp:
        batch = sharded(cp, PACKED)
        values = torch.ones(batch.position_ids.shape)
        mask = ~batch.padding
        mean: Any = partial(cp.token_mean, values, reduce="sum", documents=batch.documents)
        messages = [
            refusal(lambda: mean(mask, per="batch")),
            refusal(lambda: mean(mask.float())),
            refusal(lambda: mean(mask[:, 1:])),
            refusal(lambda: cp.token_mean(values, mask, per="sequence", reduce="sum")),
            refusal(lambda: mean(mask, per="sequence" if rank else "token")),
        ]
        assert mean(mask, per="sequence").value.item() == 1
        return messages


def test_a_mean_that_cannot_be_meant_is_refused_on_all_ranks(pool: WorkerPool) -> None:
    words = (
        "per='batch': must be one of token, sequence",
        "multiply weights into the values",
        "expected bool of",
        "documents",
        "rank",
    )
    for messages in pool.run(refused_means, 2):
        for text, word in zip(messages, words, strict=True):
            assert word in text


# Targets further ahead.


def targets_ahead(case: WholeCase, ahead: int) -> Tensor:
    """Token after token."""
    labels, real = case.labels, case.real
    targets = torch.full((*labels.shape, ahead), -100)
    for row, starts in enumerate(case.documents):
        for a, b in pairwise(starts):
            for i in range(a, b):
                for j in range(min(ahead, b - i - 1)):
                    if real[row, i]:
                        targets[row, i, j] = labels[row, i + 1 + j]
    return targets


def ahead_of(rank: int, world_size: int, ahead: int) -> list[bool]:
    same = []
    for layout in (None, "contiguous", "zigzag", "striped"):
        with ContextParallel(causal=True, layout=layout) as cp:
            for case in ALL:
                batch = sharded(cp, case, ahead=ahead)
                wanted = targets_ahead(case, ahead)
                whole = cp.unshard(batch.labels, 1, documents=batch.documents)  # type: ignore[arg-type]
                plain = sharded(cp, case, labels=wanted[..., 0], shift_labels=False, ahead=ahead)
                assert batch.num_targets is not None
                assert batch.labels is not None
                assert plain.labels is not None
                same += [
                    torch.equal(whole.view(wanted.shape), wanted),
                    torch.equal(batch.labels[..., 0], sharded(cp, case).labels),  # type: ignore[arg-type]
                    torch.equal(plain.labels[..., 0], batch.labels[..., 0]),
                    batch.num_targets.tolist() == (wanted != -100).sum((0, 1)).tolist(),
                ]
                message = refusal(lambda: sharded(cp, PLAIN, ahead=0))
                same.append("ahead=0: must be a whole number of at least 1" in message)
    return same


@pytest.mark.parametrize(("ranks", "ahead"), [(3, 4)])
def test_targets_further_ahead_cross_neither_documents_nor_padding(
    pool: WorkerPool, ranks: int, ahead: int
) -> None:
    for same in pool.run(ahead_of, ranks, ahead):
        assert all(same), same


def means_with_padding(rank: int, world_size: int) -> list[float]:
    """Of ones: 1 by tokens, whatever padding there is, with documents and with known sizes."""
    results = []
    with ContextParallel(causal=True) as cp:
        batch = cp.shard_batch(input_ids=torch.arange(11)[None], v=torch.ones(1, 11))
        everywhere = torch.ones_like(batch["v"], dtype=torch.bool)
        of_batch: Any = {"reduce": "sum", "documents": batch.documents}
        results.append(float(cp.token_mean(batch["v"], everywhere, **of_batch).value))
        with pytest.raises(MeshAttentionError, match="mask is torch"):
            cp.token_mean(batch["v"], everywhere.long(), **of_batch)
        of_batch["documents"] = cp.documents([0, 4 + rank, 11])  # others on each rank
        assert "plan is" in refusal(lambda: cp.token_mean(batch["v"], everywhere, **of_batch))
    with ContextParallel(seq_len=11, num_heads=2, head_dim=8, causal=True) as cp:
        ones = cp.shard(torch.ones(1, 11), 1)
        everywhere = torch.ones_like(ones, dtype=torch.bool)
        results.append(float(cp.token_mean(ones, everywhere, reduce="sum").value))
    return results


def test_padding_counts_in_no_mean(pool: WorkerPool) -> None:
    for result in pool.run(means_with_padding, 2):
        assert result == [1.0, 1.0]
