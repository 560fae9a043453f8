"""Losses in chunks have the numbers of whole logits in one process, in float64, whatever kind
of weight it is, and take no more than their memory."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from mesh_attention import ContextParallel
from support.head_case import error, head, true_loss
from support.live_memory import LiveMemory
from support.pool import WorkerPool
from support.tiny_gpt import VOCABULARY, WholeCase
from support.training import FEW, PACKED, PLAIN, ROWS, refusal, sharded

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "all": {"label_smoothing": 0.2, "z_loss": 0.1, "softcap": 1.5, "chunk_tokens": 3},
    "one token at a time": {"z_loss": 1e-3, "chunk_tokens": 1},
}


def one_case(cp: ContextParallel, case: WholeCase, how: dict[str, Any]) -> float:
    """The largest error of the value and of all gradients, which are added up over ranks."""
    whole = [x.requires_grad_() for x in head(case)]
    count = int((case.targets != -100).sum())
    wanted = true_loss(whole[0] @ whole[1].T + whole[2], case.targets, **how) / count
    true_grads = torch.autograd.grad(wanted, whole)
    batch = sharded(cp, case)
    part = cp.shard(whole[0].detach(), 1, documents=batch.documents).requires_grad_()
    weight, bias = (x.detach().clone().requires_grad_() for x in whole[1:])
    mean = cp.linear_cross_entropy(part, weight, batch.labels, bias=bias, reduce="sum", **how)
    mean.loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
    first = [x.grad.clone() for x in (part, weight, bias) if x.grad is not None]
    mean.loss.backward()  # type: ignore[no-untyped-call]
    twice = [error(x.grad, 2 * y) for x, y in zip((part, weight, bias), first, strict=True)]
    for grad in first[1:]:
        dist.all_reduce(grad)
    true_part = cp.shard(true_grads[0], 1, documents=batch.documents)
    errors = [error(a, b) for a, b in zip(first, (true_part, *true_grads[1:]), strict=True)]
    if not true_part.any():  # a rank without targets
        errors[0] = first[0].abs().max().item()
    # Whole logits by the other loss, where it has such settings.
    if not {"softcap", "z_loss"} & {*how}:
        logits = (part @ weight.T + bias).detach().requires_grad_()
        other = cp.cross_entropy(logits, batch.labels, reduce="sum", **how)
        errors.append(abs(other.value.item() - wanted.item()))
        other.loss.backward()  # type: ignore[no-untyped-call]
        assert logits.grad is not None
        errors.append((logits.grad @ weight - first[0]).abs().max().item())
    assert mean.num_targets.item() == count
    return max(abs(mean.value.item() - wanted.item()), *errors, *twice)


def exact(rank: int, world_size: int) -> dict[str, float]:
    with ContextParallel(causal=True) as cp:
        return {
            f"{name}, batch {number}": one_case(cp, case, how)
            for name, how in SETTINGS.items()
            for number, case in enumerate((PACKED, ROWS, FEW))
        }


@pytest.mark.parametrize("ranks", [1, 3])
def test_losses_and_gradients_are_those_of_whole_logits_in_float64(
    pool: WorkerPool, ranks: int
) -> None:
    for errors in pool.run(exact, ranks):
        assert max(errors.values()) < 1e-12, errors


# Who holds the weight.


def kinds_of_weight(rank: int, world_size: int) -> dict[str, Any]:
    """Frozen with adapters, sharded over the vocabulary, under autocast, compiled, without
    gradients; and passes that are refused."""
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("tp", "cp"))
    seen: dict[str, Any] = {}
    with ContextParallel(mesh["cp"], causal=True) as cp:
        batch = sharded(cp, PACKED)
        hidden, weight, bias = head(PACKED)
        hidden.requires_grad_()
        loss = partial(cp.linear_cross_entropy, labels=batch.labels, reduce="sum")
        logits = cp.cross_entropy(hidden @ weight.T, batch.labels, reduce="sum")
        [true_grad] = torch.autograd.grad(logits.loss, hidden)

        down, up = torch.randn(2, 8).double(), torch.zeros(VOCABULARY, 2).double()
        adapters = [x.requires_grad_() for x in (down, up)]
        mean = loss(hidden, weight + up @ down)
        grads = torch.autograd.grad(mean.loss, [hidden, *adapters])
        whole = cp.cross_entropy(hidden @ (weight + up @ down).T, batch.labels, reduce="sum")
        wanted = torch.autograd.grad(whole.loss, adapters)
        seen["adapters"] = max(map(error, grads, (true_grad, *wanted)))
        seen["frozen"] = error(torch.autograd.grad(loss(hidden, weight).loss, hidden)[0], true_grad)

        parts: Any = distribute_tensor(weight, mesh["tp"], [Shard(0)]).requires_grad_()
        seen["vocabulary"] = refusal(lambda: loss(hidden, parts))
        torch.autograd.backward(loss(hidden.detach(), parts.full_tensor()).loss)
        plain = weight.clone().requires_grad_()
        torch.autograd.backward(loss(hidden.detach(), plain).loss)
        assert plain.grad is not None
        seen["gathered"] = error(parts.grad.full_tensor(), plain.grad)
        parts.grad = None
        # Were these replicas: FSDP2 around groups of one rank.
        torch.autograd.backward(loss(hidden.detach(), parts, data_parallel=mesh["tp"]).loss)
        seen["replicas"] = error(parts.grad.full_tensor(), plain.grad)

        with torch.autocast("cpu", torch.bfloat16):
            low = loss(hidden.float(), weight.float())
        seen["autocast"] = (low.value - logits.value).abs().item(), low.loss.dtype
        compiled = torch.compile(lambda: loss(hidden.sin(), weight).loss * 2, backend="eager")
        seen["compiled"] = (compiled() - loss(hidden.sin(), weight).loss * 2).abs().item()
        for mode in (torch.no_grad, torch.inference_mode):
            with mode(), LiveMemory() as memory:
                mean = loss(hidden, weight)
            assert not mean.loss.requires_grad
            assert memory.peak_bytes < 6 * len(hidden[0]) * VOCABULARY * 8
            seen[mode.__name__] = abs(mean.value.item() - logits.value.item())

        mean = loss(hidden, weight)
        torch.autograd.grad(mean.loss, hidden)
        with pytest.raises(RuntimeError, match="Specify retain_graph=True"):
            torch.autograd.grad(mean.loss, hidden)
        whole = cp.cross_entropy(hidden @ weight.T, batch.labels, reduce="sum")
        for name, mean in (("second", loss(hidden, weight)), ("second of logits", whole)):
            seen[name] = refusal(partial(torch.autograd.grad, mean.loss, hidden, create_graph=True))
        wrong: dict[str, dict[str, Any]] = {
            "bias": {"bias": bias[1:]},
            "softcap": {"softcap": 0.0},
            "z_loss": {"z_loss": -1.0},
            "chunk_tokens": {"chunk_tokens": 0},
        }
        for name, how in wrong.items():
            seen[name] = refusal(partial(loss, hidden, weight, **how))
        seen["dtypes"] = refusal(lambda: loss(hidden.float(), weight))
        seen["no weight"] = refusal(lambda: loss(hidden, None))  # type: ignore[arg-type]
        seen["width"] = refusal(lambda: loss(hidden, weight[:, 1:]))
    return seen


TOLD = {
    "vocabulary": "x.full_tensor() if ranks of its mesh have the same tokens",
    "second": "second derivatives",
    "second of logits": "second derivatives",
    "bias": f"a bias of (vocabulary,), here ({VOCABULARY},)",
    "no weight": "weight is NoneType; it must be a torch.Tensor",
    "softcap": "softcap=0.0: must be finite and above 0",
    "z_loss": "z_loss=-1.0: must be finite and above 0",
    "chunk_tokens": "chunk_tokens=0: must be a whole number of at least 1",
    "dtypes": "or call under torch.autocast",
    "width": "(vocabulary, 8), as nn.Linear has it",
}


def test_any_weight_is_exact_or_refused_by_name(pool: WorkerPool) -> None:
    for seen in pool.run(kinds_of_weight, 2):
        for name, words in TOLD.items():
            assert words in seen.pop(name), name
        off, dtype = seen.pop("autocast")
        assert (off < 0.02, dtype) == (True, torch.float32)
        assert max(seen.values()) < 1e-12, seen


def of_low_rank(rank: int, world_size: int) -> tuple[float, list[str]]:
    """A second product of few columns, under a softcap, in chunks."""
    with ContextParallel(causal=True) as cp:
        batch = sharded(cp, PACKED)
        hidden, weight, _ = head(PACKED)
        hidden = cp.shard(hidden, 1, documents=batch.documents)
        few, matrix = (
            torch.randn(*hidden.shape[:2], 2).double(),
            torch.randn(VOCABULARY, 2).double(),
        )
        leaves = [x.clone().requires_grad_() for x in (hidden, weight, few, matrix)]
        loss: Any = partial(cp.linear_cross_entropy, labels=batch.labels, reduce="sum")
        pair = (leaves[2], leaves[3])
        mean = loss(*leaves[:2], low_rank=pair, softcap=1.5, chunk_tokens=3)
        capped = 1.5 * torch.tanh((leaves[0] @ leaves[1].T + pair[0] @ pair[1].T) / 1.5)
        whole = cp.cross_entropy(capped, batch.labels, reduce="sum")
        grads, wanted = (torch.autograd.grad(x.loss, leaves) for x in (mean, whole))
        wrong = ((few[..., :1], matrix), matrix)
        words = [refusal(partial(loss, hidden, weight, low_rank=x)) for x in wrong]
        return max(map(error, grads, wanted)), words


def test_a_product_of_few_columns_has_the_gradients_of_whole_logits(pool: WorkerPool) -> None:
    for off, [other, no_pair] in pool.run(of_low_rank, 2):
        assert off < 1e-12
        assert f"low_rank[1] is torch.float64 of shape ({VOCABULARY}, 2)" in other
        assert "low_rank is Tensor: give a pair" in no_pair


# Memory.


def peaks(rank: int, world_size: int) -> dict[str, float]:
    """Of both losses, in units of what they may take."""
    shares = {}
    with ContextParallel(causal=True) as cp:
        for dtype, tokens in ((torch.float32, 512), (torch.bfloat16, 64)):
            width, vocabulary, chunk = 32, 2 * tokens, tokens // 16
            hidden = torch.ones(1, tokens, width, dtype=dtype, requires_grad=True)
            weight = torch.ones(vocabulary, width, dtype=dtype, requires_grad=True)
            labels = torch.zeros(1, tokens, dtype=torch.long)
            with LiveMemory() as memory:
                mean = cp.linear_cross_entropy(
                    hidden, weight, labels, reduce="sum", chunk_tokens=chunk
                )
                mean.loss.backward()  # type: ignore[no-untyped-call]
            allowed = hidden.nbytes + 4 * vocabulary * (width + 2 * chunk)
            shares[f"linear {dtype}"] = memory.peak_bytes / allowed
            logits = torch.zeros(1, tokens, 2**22 // tokens, dtype=dtype, requires_grad=True)
            with LiveMemory() as memory:
                cp.cross_entropy(logits, labels, reduce="sum").loss.backward()  # type: ignore[no-untyped-call]
            shares[f"logits {dtype}"] = memory.peak_bytes / logits.nbytes + 1
    return shares


def test_losses_take_no_more_memory_than_two_chunks_and_their_gradients(pool: WorkerPool) -> None:
    for shares in pool.run(peaks, 1):
        for name, share in shares.items():
            assert 0.8 < share <= (1.2 if "linear" in name else 2.5), shares


def other_replica(rank: int, world_size: int) -> list[str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    with ContextParallel(mesh["cp"], causal=True) as cp:
        batch = sharded(cp, PLAIN)
        hidden = torch.zeros(*batch.position_ids.shape, 4)
        few = torch.zeros(VOCABULARY, 2)
        loss = partial(
            cp.linear_cross_entropy, hidden, torch.zeros(VOCABULARY, 4), batch.labels, reduce="sum"
        )
        messages = [
            refusal(partial(loss, data_parallel=mesh["dp"], z_loss=0.1 * (rank // 2))),
            refusal(partial(loss, softcap=1.0 + rank % 2)),
            refusal(partial(loss, bias=torch.zeros(VOCABULARY) if rank % 2 else None)),
            refusal(partial(loss, low_rank=(hidden[..., :2], few) if rank % 2 else None)),
        ]
        loss()
        return messages


def test_ranks_and_replicas_with_another_loss_are_told(pool: WorkerPool) -> None:
    for replica, rank, bias, low_rank in pool.run(other_replica, 4):
        assert "another reduce, ignore_index, label_smoothing, z_loss or softcap" in replica
        assert "softcap is" in rank
        assert "shape of the bias" in bias
        assert "shape of the second matrix of low_rank" in low_rank
