"""Batches and losses: a GPT on ranks has the losses and gradients of one process, whatever the
batch, the number of targets of each rank, and whoever reduces gradients.

Tests name the needs of users that they show, by their numbers: loss normalisation (3),
data-parallel by context-parallel ranks (9), positions (11).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from mesh_attention import ContextParallel, doctor
from support.pool import WorkerPool
from support.tiny_gpt import Model, WholeCase, make_model
from support.training import (
    ALL,
    FEW,
    LEFT,
    PACKED,
    PLAIN,
    POSITIONS,
    RATE,
    RIGHT,
    ROWS,
    Steps,
    Trained,
    logits_of,
    make,
    refusal,
    sharded,
    truth,
    truth_and_parameters,
)


def grads_of(model: torch.nn.Module) -> list[Tensor]:
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return [g.full_tensor() if hasattr(g, "full_tensor") else g.clone() for g in grads]


def check(results: list[Trained], wanted: Trained) -> None:
    for of_rank in results:
        for (loss, grads), (true_loss, true_grads) in zip(of_rank, wanted, strict=True):
            assert abs(loss - true_loss) < 1e-5 * true_loss
            for a, b in zip(grads, true_grads, strict=True):
                assert (a - b).abs().max() <= 1e-5 * b.abs().max() + 1e-9


# Gradients are added up by hand.


def by_hand(rank: int, world_size: int, cases: list[WholeCase]) -> Trained:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    results = []
    with make() as cp:
        for case in cases:
            optimizer.zero_grad()
            batch = sharded(cp, case)
            mean = cp.cross_entropy(logits_of(cp, model, batch), batch.labels, reduce="sum")
            mean.loss.backward()  # type: ignore[no-untyped-call]
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            results.append((mean.value.item(), grads_of(model)))
            optimizer.step()
    return results


@pytest.mark.parametrize("ranks", [1, 4])
def test_training_on_any_batches_has_losses_and_gradients_of_one_process(
    pool: WorkerPool, ranks: int
) -> None:
    """Needs 3 and 11: also with targets on one rank alone."""
    cases = [*ALL, FEW]
    [wanted] = pool.run(truth, 1, [[case] for case in cases])
    check(pool.run(by_hand, ranks, cases), wanted)


# Frameworks that average, on data-parallel by context-parallel ranks.


def parameters_of(model: torch.nn.Module) -> list[Tensor]:
    results: list[Any] = [p.detach() for p in model.parameters()]
    return [x.full_tensor() if hasattr(x, "full_tensor") else x.clone() for x in results]


def by_framework(
    rank: int, world_size: int, name: str, ranks: list[list[int]], steps: Steps
) -> tuple[Trained, list[Tensor]]:
    """`ranks` of the mesh, a row for each context-parallel group; also the last parameters."""
    from torch.distributed.fsdp import fully_shard  # seconds, which the pool has spent already

    mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("dp", "cp"))
    whole: Any = mesh["dp", "cp"]._flatten("dp_cp")
    plain: Model = make_model()
    if name == "ddp":
        model: Any = DistributedDataParallel(plain)
    else:
        over = mesh if name == "hsdp" else whole  # replicated over dp, or sharded over all
        for block in plain.blocks:
            fully_shard(block, mesh=over)
        model = fully_shard(plain, mesh=over)
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    place = mesh.get_coordinate()
    assert place is not None
    results = []
    with make(mesh["cp"]) as cp:
        for cases in steps:
            optimizer.zero_grad()
            batch = sharded(cp, cases[place[0]])
            logits = logits_of(cp, model, batch)
            counted: Any = whole if name == "fsdp" else mesh["dp"]  # either will do
            reduce: Any = "ddp" if name == "ddp" else "fsdp"
            mean = cp.cross_entropy(logits, batch.labels, reduce=reduce, data_parallel=counted)
            mean.loss.backward()  # type: ignore[no-untyped-call]
            results.append((mean.value.item(), grads_of(model)))
            optimizer.step()
    return results, parameters_of(model)


ORDERED, ODD = [[0, 1], [2, 3]], [[3, 0], [1, 2]]


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        ("ddp", [[0]]),
        pytest.param("ddp", [[0, 1]], marks=pytest.mark.slow),
        *(("ddp", ODD), ("fsdp", ODD), ("hsdp", ORDERED)),
    ],
)
def test_frameworks_that_average_gradients_get_those_of_the_mean_over_all_tokens(
    pool: WorkerPool, name: str, ranks: list[list[int]]
) -> None:
    """Needs 3 and 9: also in any order of the mesh, and with ranks that have no target. Parameters
    after the steps are those of one process too."""
    batches = [[PACKED, RIGHT], [FEW, POSITIONS], [PLAIN, FEW]]
    steps = [cases[: len(ranks)] for cases in batches]
    [(wanted, parameters)] = pool.run(truth_and_parameters, 1, steps)
    results = pool.run(by_framework, sum(map(len, ranks)), name, ranks, steps)
    check([trained for trained, _ in results], wanted)
    for _, after in results:
        for a, b, before in zip(after, parameters, make_model().parameters(), strict=True):
            assert (a - b).abs().max() <= 1e-5 * (b - before).abs().max() + 1e-7


def accumulated(rank: int, world_size: int) -> Trained:
    """Two batches in one step: the number of targets of both is known before."""
    model = make_model()
    with make() as cp:
        batches = [sharded(cp, case) for case in (PACKED, FEW)]
        counts = [batch.num_targets for batch in batches]
        assert all(isinstance(count, Tensor) for count in counts)
        total, value = sum(counts), 0.0  # type: ignore[arg-type]
        for batch in batches:
            mean = cp.cross_entropy(
                *(logits_of(cp, model, batch), batch.labels), reduce="sum", num_targets=total
            )
            mean.loss.backward()  # type: ignore[no-untyped-call]
            value += mean.value.item()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        return [(value, grads_of(model))]


def test_gradients_accumulate_to_the_mean_over_several_batches(pool: WorkerPool) -> None:
    [wanted] = pool.run(truth, 1, [[PACKED, FEW]])
    check(pool.run(accumulated, 2), wanted)


# The page.

PAGE = (Path(__file__).parents[2] / "docs" / "training.md").read_text()


class ModelOfThePage(Model):
    """It attends as the page says, with the names of its loop."""

    names: dict[str, Any]

    def forward(self, input_ids: Tensor, position_ids: Tensor, documents: Any) -> Tensor:
        def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            [line] = re.findall(r"^out = cp.attention.*$", PAGE, flags=re.MULTILINE)
            names: dict[str, Any] = {"q": q, "k": k, "v": v, "documents": documents}
            exec(line, self.names, names)
            out: Tensor = names["out"]
            return out

        return super().forward(input_ids, position_ids, attention)


def as_on_the_page(rank: int, world_size: int, steps: Steps) -> list[float]:
    _, loop, *blocks = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    model = ModelOfThePage()
    model.load_state_dict(make_model().state_dict())
    own = [cases[rank // 2] for cases in steps]
    losses: list[float] = []
    names = model.names = {
        "device_type": "cpu",
        "dp_size": 2,
        "cp_size": 2,
        "ContextParallel": ContextParallel,
        "DistributedDataParallel": DistributedDataParallel,
        "init_device_mesh": init_device_mesh,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), RATE),
        "loader": [{"input_ids": x.input_ids, "labels": x.labels, **x.arguments} for x in own],
        "losses": losses,
        "doctor": doctor,
    }
    exec(loop, names)
    [asked] = [block for block in blocks if "doctor(" in block]
    exec(asked, names)
    assert names["report"].is_right
    names["cp"].close()
    return losses


def test_the_loop_of_the_page_has_the_losses_of_one_process(pool: WorkerPool) -> None:
    steps = [[PACKED, RIGHT], [ROWS, PLAIN], [LEFT, POSITIONS]]
    [wanted] = pool.run(truth, 1, steps)
    for losses in pool.run(as_on_the_page, 4, steps):
        assert losses == pytest.approx([loss for loss, _ in wanted], rel=1e-5)


def made_ahead(rank: int, world_size: int) -> list[float]:
    model, losses = make_model(), []
    cases = [PACKED, ROWS, PACKED, ROWS]
    loader = [{"input_ids": x.input_ids, "labels": x.labels, **x.arguments} for x in cases]
    with make() as cp:
        for whole, docs in cp.prefetch(loader, lambda whole: whole["cu_seqlens"]):
            batch = cp.shard_batch(**whole, documents=docs)
            mean = cp.cross_entropy(logits_of(cp, model, batch), batch.labels, reduce="sum")
            losses.append(mean.value.item())
    return losses


def test_documents_may_be_made_ahead(pool: WorkerPool) -> None:
    [[(packed, _)]], [[(rows, _)]] = (pool.run(truth, 1, [[case]]) for case in (PACKED, ROWS))
    for losses in pool.run(made_ahead, 2):
        assert losses == pytest.approx([packed, rows, packed, rows], rel=1e-5)


def labels_of_another_batch(rank: int, world_size: int) -> list[str]:
    """What was computed from one batch, and labels of another of that length."""
    cp: Any = make()
    seen = []
    model = make_model()
    for case in (PACKED, PLAIN):
        part, other = (sharded(cp, case) for _ in range(2))
        assert part.labels is not None
        for batch in (part, other):
            logits = logits_of(cp, model, batch)
        seen.append(refusal(lambda: cp.cross_entropy(logits, part.labels, reduce="sum")))  # noqa: B023
        seen.append(refusal(lambda: cp.log_probs(logits, part.labels)))  # noqa: B023
        values = [
            cp.cross_entropy(logits, labels, reduce="sum").value
            for labels in (other.labels, 1 * part.labels)
        ]
        assert values[0] == values[1]
    return seen


def test_labels_of_another_batch_than_the_attention_before_the_logits_are_refused(
    pool: WorkerPool,
) -> None:
    for words in pool.run(labels_of_another_batch, 2):
        assert all("targets are those of another batch than" in message for message in words)
        assert "logits, which" in words[0]
        assert "hidden_or_logits, which" in words[1]
