"""Losses of some tokens alone are exact. Numbers that cannot be meant, or that ranks do not say
alike, are refused on all."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from mesh_attention import ContextParallel
from support.pool import WorkerPool
from support.tiny_gpt import VOCABULARY
from support.training import PLAIN, refusal, sharded

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "this rank's own": ({"num_targets": "own"}, "another number on other ranks"),
    "few": ({"num_targets": 3}, "fewer than the"),
    "none": ({"num_targets": 0}, "fewer than the"),
    "negative": ({"num_targets": -3}, "num_targets=-3: give how many targets"),
    "nan": ({"num_targets": torch.nan}, "num_targets=nan: give how many targets"),
    "more than counts": ({"num_targets": 10**30}, "num_targets=1000"),
    "words": ({"num_targets": "19"}, "num_targets='19': give how many targets"),
    "smoothing": ({"label_smoothing": 2.0}, "label_smoothing=2.0: must be at most 1"),
    "nan smoothing": ({"label_smoothing": torch.nan}, "must be finite"),
    "index": ({"ignore_index": None}, "ignore_index=None: must be a whole number"),
    "its own group": ({"data_parallel": "cp"}, "of the context-parallel group itself"),
}


def wrong_numbers(rank: int, world_size: int) -> tuple[dict[str, str], list[float]]:
    """On two of three ranks, so that the job has others; and bytes as labels."""
    group = dist.new_group([0, 1])
    messages: dict[str, str] = {}
    if rank == 2:
        return messages, []
    with ContextParallel(group, causal=True) as cp:
        batch = sharded(cp, PLAIN)
        assert batch.labels is not None
        chance = torch.Generator().manual_seed(rank)
        logits = torch.randn(*batch.labels.shape, 256, generator=chance)
        for name, (inputs, _) in WRONG.items():
            changed = dict(inputs)
            if changed.get("num_targets") == "own":
                changed["num_targets"] = (batch.labels != -100).sum() + rank
            if "data_parallel" in changed:
                changed["data_parallel"] = group
            messages[name] = refusal(
                partial(cp.cross_entropy, logits, batch.labels, reduce="sum", **changed)
            )
        whole = PLAIN.labels.clamp(min=0)
        losses = [
            cp.cross_entropy(logits, each.labels, reduce="sum").value.item()
            for each in (sharded(cp, PLAIN, labels=x) for x in (whole, whole.to(torch.uint8)))
        ]
        messages["labels"] = refusal(lambda: sharded(cp, PLAIN, labels=whole > 0))
        return messages, losses


def test_numbers_that_cannot_be_meant_are_refused_on_all_ranks_and_bytes_are_labels(
    pool: WorkerPool,
) -> None:
    for messages, losses in pool.run(wrong_numbers, 3)[:2]:
        for name, (_, words) in WRONG.items():
            assert words in messages[name], name
        assert "labels are torch.bool: must be whole numbers" in messages["labels"]
        assert losses[0] == losses[1]


def some_tokens(rank: int, world_size: int) -> list[float]:
    """Logits of selected tokens alone, of which one rank has none, held against all of them."""
    torch.manual_seed(rank)
    with ContextParallel(causal=True) as cp:
        batch: Any = sharded(cp, PLAIN)
        hidden = torch.randn(*batch.labels.shape, 8, dtype=torch.float64, requires_grad=True)
        weight = torch.randn(VOCABULARY, 8, dtype=torch.float64, requires_grad=True)
        keep = (torch.rand(batch.labels.shape) < 0.5) & (batch.labels != -100)
        keep &= torch.tensor(rank > 0)
        labels = batch.labels.masked_fill(~keep, -100)
        few, of_few = hidden[keep], batch.labels[keep]
        assert len(few) == 0 or rank > 0

        def mean(x: Tensor, tokens: Tensor, mask: Tensor) -> Any:
            log_probs, _ = cp.log_probs(x @ weight.T, tokens)
            return cp.token_mean(-log_probs, mask, reduce="sum")

        every = torch.ones(len(few), dtype=torch.bool)
        pairs = [
            (
                cp.cross_entropy(x @ weight.T, y, reduce="sum"),
                cp.linear_cross_entropy(x, weight, y, reduce="sum"),
                mean(x, y, mask),
            )
            for x, y, mask in ((hidden, labels, keep), (few, of_few, every))
        ]
        errors = []
        for whole, selected in zip(*pairs, strict=True):
            errors.append(float((whole.value - selected.value).abs()))
            wanted, seen = (
                torch.autograd.grad(x.loss, [hidden, weight], retain_graph=True)
                for x in (whole, selected)
            )
            errors += [float((a - b).abs().max()) for a, b in zip(wanted, seen, strict=True)]
        return errors


def test_losses_of_selected_tokens_are_exact_where_ranks_have_other_numbers_of_them(
    pool: WorkerPool,
) -> None:
    for errors in pool.run(some_tokens, 3):
        assert max(errors) < 1e-12, errors


def called_otherwise(rank: int, world_size: int) -> dict[str, str]:
    """What PyTorch's losses take and return."""
    with ContextParallel(causal=True) as cp:
        batch: Any = sharded(cp, PLAIN)
        logits = torch.zeros(*batch.labels.shape, VOCABULARY)
        mean: Any = cp.cross_entropy(logits, batch.labels, reduce="sum")
        loss: Any = partial(cp.cross_entropy, logits, batch.labels)
        messages = {
            "no reduce": refusal(loss),
            "weight": refusal(lambda: loss(reduce="sum", weight=torch.ones(VOCABULARY))),
            "no mask": refusal(lambda: cp.token_mean(logits[..., 0], reduce="sum")),  # type: ignore[call-arg]
            "float": refusal(lambda: float(mean)),
            "scaled": refusal(lambda: mean * 2),
            "sum": refusal(lambda: sum([mean])),
            "batch": refusal(lambda: cp.positions(documents=batch)),
        }
        for x, name in ((mean, "backward"), (batch, "pop")):
            with pytest.raises(AttributeError) as error:
                getattr(x, name)
            messages[name] = str(error.value)
        return messages


def test_what_torch_losses_take_and_return_is_told_from_ours(pool: WorkerPool) -> None:
    way_out = "call backward on its loss, which may be scaled and added, and print its value"
    for messages in pool.run(called_otherwise, 2):
        for name in ("no reduce", "weight", "no mask"):
            assert 'reduce is "ddp", "fsdp" or "sum"' in messages[name]
        assert "mask says which values count" in messages["no mask"]
        for name in ("float", "scaled", "sum", "backward"):
            assert way_out in messages[name]
        assert messages["batch"] == "documents is a whole batch: give documents=batch.documents"
        assert "dict(batch) can be changed" in messages["pop"]


def other_replica(rank: int, world_size: int) -> list[str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    replica = rank // 2
    calls: list[dict[str, Any]] = [
        {"reduce": "sum" if replica else "ddp"},
        {"reduce": "sum", "label_smoothing": 0.1 * replica},
        {"reduce": "sum", "num_targets": 100 + replica},
    ]
    with ContextParallel(mesh["cp"], causal=True) as cp:
        batch = sharded(cp, PLAIN)
        logits = torch.zeros(*batch.position_ids.shape, VOCABULARY)
        loss = partial(cp.cross_entropy, logits, batch.labels, data_parallel=mesh["dp"])
        return [refusal(partial(loss, **call)) for call in calls]


def test_replicas_that_call_another_loss_are_told(pool: WorkerPool) -> None:
    for reduce, smoothing, number in pool.run(other_replica, 4):
        assert "another reduce, ignore_index or label_smoothing" in reduce
        assert "another reduce, ignore_index or label_smoothing" in smoothing
        assert "another number on other ranks" in number
