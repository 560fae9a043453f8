"""Batches and losses: a GPT on ranks has the losses and gradients of one process, whatever the
batch, the number of targets of each rank, and whoever reduces gradients.

Tests name the needs of users that they show, by their numbers: loss normalisation (3), every
argument used or refused (6), labels shifted before the cut (8), data-parallel by context-parallel
ranks (9), positions (11), batches sharded twice or different (12), evaluation (20).
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from mesh_attention import ContextParallel, Mask, MeshAttentionError
from mesh_attention.losses import TokenMean
from mesh_attention.sharded_batch import ShardedBatch
from support.pool import WorkerPool
from support.tiny_gpt import HEAD_DIM, HEADS, VOCABULARY, Model, WholeCase, make_model, one_process

RATE = 0.5
Steps = list[list[WholeCase]]  # the batches of all data-parallel ranks, for each step
Trained = list[tuple[float, list[Tensor]]]  # loss and gradients of each step

PACKED = WholeCase({"cu_seqlens": [0, 9, 10, 37]}, [[0, 9, 10, 37]])
PLAIN = WholeCase({}, [[0, 19]] * 2)
ROWS = WholeCase({"cu_seqlens": [[0, 4, 23], [0, 17, 18, 23]]}, [[0, 4, 23], [0, 17, 18, 23]])
POSITIONS = WholeCase({"position_ids": torch.tensor([[*range(5), *range(12)]])}, [[0, 5, 17]] * 2)
RIGHT = WholeCase(
    {"attention_mask": torch.arange(21) < torch.tensor([[21], [13], [5]])},
    [[0, 21], [0, 13, 21], [0, 5, 21]],
    [0, 8, 16],
)
LEFT = WholeCase(
    {"attention_mask": (torch.arange(11) >= torch.tensor([[3], [3]])).long()},
    [[0, 3, 11]] * 2,
    [-3, -3],
)
ALL = [PACKED, PLAIN, ROWS, POSITIONS, RIGHT, LEFT]


class FewTargets(WholeCase):
    """All in one place, so that most ranks have none."""

    @property
    def labels(self) -> Tensor:
        labels = torch.full_like(self.input_ids, -100)
        labels[0, 2:4] = self.input_ids[0, 2:4]
        return labels


FEW = FewTargets({}, [[0, 33]])


def make(group: Any = None) -> ContextParallel:
    return ContextParallel(group, causal=True)


def sharded(cp: ContextParallel, case: WholeCase, **changes: Any) -> ShardedBatch:
    given = {"input_ids": case.input_ids, "labels": case.labels, **case.given, **changes}
    return cp.shard_batch(**given)


def logits_of(cp: ContextParallel, model: Any, batch: ShardedBatch) -> Tensor:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = cp.attention(q, k, v, documents=batch.documents)
        assert isinstance(out, Tensor)
        return out

    logits: Tensor = model(batch.input_ids, batch.position_ids, attention)
    return logits


def grads_of(model: torch.nn.Module) -> list[Tensor]:
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return [g.full_tensor() if hasattr(g, "full_tensor") else g.clone() for g in grads]


def truth(rank: int, world_size: int, steps: Steps) -> Trained:
    """In a process of the pool, which has imported all that gradients and optimizers import."""
    return one_process(steps, RATE)


def check(found: list[Trained], wanted: Trained) -> None:
    for of_rank in found:
        for (loss, grads), (true_loss, true_grads) in zip(of_rank, wanted, strict=True):
            assert abs(loss - true_loss) < 1e-5 * true_loss
            for a, b in zip(grads, true_grads, strict=True):
                assert (a - b).abs().max() <= 1e-5 * b.abs().max() + 1e-9


# Gradients are added up by hand.


def by_hand(rank: int, world_size: int, cases: list[WholeCase]) -> Trained:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    found = []
    with make() as cp:
        for case in cases:
            optimizer.zero_grad()
            batch = sharded(cp, case)
            mean = cp.cross_entropy(logits_of(cp, model, batch), batch.labels, reduce="sum")
            mean.loss.backward()  # type: ignore[no-untyped-call]
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            found.append((mean.value.item(), grads_of(model)))
            optimizer.step()
    return found


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_training_on_any_batches_has_losses_and_gradients_of_one_process(
    pool: WorkerPool, ranks: int
) -> None:
    """Needs 3 and 11: also with targets on one rank alone."""
    cases = [*ALL, FEW]
    [wanted] = pool.run(truth, 1, [[case] for case in cases])
    check(pool.run(by_hand, ranks, cases), wanted)


# Frameworks that average, on data-parallel by context-parallel ranks.


def by_framework(rank: int, world_size: int, name: str, dp_size: int, steps: Steps) -> Trained:
    from torch.distributed.fsdp import fully_shard  # seconds, which the pool has spent already

    mesh = init_device_mesh("cpu", (dp_size, world_size // dp_size), mesh_dim_names=("dp", "cp"))
    whole: Any = mesh["dp", "cp"]._flatten("dp_cp")
    plain: Model = make_model()
    if name == "ddp":
        model: Any = DistributedDataParallel(plain)
    else:
        for block in plain.blocks:
            fully_shard(block, mesh=whole)
        model = fully_shard(plain, mesh=whole)
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    found = []
    with make(mesh["cp"]) as cp:
        for cases in steps:
            optimizer.zero_grad()
            batch = sharded(cp, cases[mesh["dp"].get_local_rank()])
            logits = logits_of(cp, model, batch)
            over: Any = mesh["dp"] if name == "ddp" else whole  # either will do
            reduce: Any = name
            mean = cp.cross_entropy(logits, batch.labels, reduce=reduce, data_parallel=over)
            mean.loss.backward()  # type: ignore[no-untyped-call]
            found.append((mean.value.item(), grads_of(model)))
            optimizer.step()
    return found


@pytest.mark.parametrize(("name", "dp_size"), [("ddp", 1), ("ddp", 2), ("fsdp", 2)])
def test_frameworks_that_average_gradients_get_those_of_the_mean_over_all_tokens(
    pool: WorkerPool, name: str, dp_size: int
) -> None:
    """Needs 3 and 9, with two context-parallel ranks."""
    batches = [[PACKED, RIGHT], [FEW, POSITIONS], [PLAIN, FEW]]
    steps = [cases[:dp_size] for cases in batches]
    [wanted] = pool.run(truth, 1, steps)
    check(pool.run(by_framework, 2 * dp_size, name, dp_size, steps), wanted)


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
    loop = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)[1]
    model = ModelOfThePage()
    model.load_state_dict(make_model().state_dict())
    mine = [cases[rank // 2] for cases in steps]
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
        "loader": [{"input_ids": x.input_ids, "labels": x.labels, **x.given} for x in mine],
        "losses": losses,
    }
    exec(loop, names)
    names["cp"].close()
    return losses


def test_the_loop_of_the_page_has_the_losses_of_one_process(pool: WorkerPool) -> None:
    steps = [[PACKED, RIGHT], [ROWS, PLAIN], [LEFT, POSITIONS]]
    [wanted] = pool.run(truth, 1, steps)
    for losses in pool.run(as_on_the_page, 4, steps):
        assert losses == pytest.approx([loss for loss, _ in wanted], rel=1e-5)


# What a rank gets of a batch.


def put_together(rank: int, world_size: int, case: WholeCase) -> list[Any]:
    with make() as cp:
        weights = torch.rand(*case.input_ids.shape, 3, generator=torch.Generator().manual_seed(0))
        batch = sharded(cp, case, weights=weights)
        assert batch.labels is not None
        docs = batch.documents
        slots = cp.padding(documents=docs)
        names = ("input_ids", "position_ids", "labels", "padding", "weights")
        whole = [cp.unshard(batch[name], 1, documents=docs) for name in names]
        rows = case.input_ids.shape
        return [
            *(x.reshape(*rows, *x.shape[2:]) for x in whole),
            bool((batch.labels[:, slots] == -100).all()),
            bool(batch.padding[:, slots].all()),
            torch.equal(whole[-1], weights),
            cp.unshard(logits_of(cp, make_model(), batch), 1, documents=docs),
        ]


@pytest.mark.parametrize("case", ALL, ids=lambda case: next(iter(case.given), "plain"))
def test_every_token_keeps_its_position_target_and_padding_and_logits_come_back_in_order(
    pool: WorkerPool, case: WholeCase
) -> None:
    """Needs 8 and 20."""
    for ids, positions, labels, padding, _, ignored, masked, others, logits in pool.run(
        put_together, 3, case
    ):
        assert torch.equal(ids, case.input_ids)
        assert torch.equal(positions, case.positions)
        assert torch.equal(labels, case.targets)
        assert torch.equal(padding, ~case.real)
        assert ignored
        assert masked
        assert others
        with torch.no_grad():
            wanted = make_model()(case.input_ids, case.positions, case.attention)
        assert (logits - wanted)[case.real].abs().max() < 1e-5


def by_the_object(rank: int, world_size: int) -> list[bool]:
    """An object whose mask has documents says all: batches bring none."""
    sizes = {"seq_len": 37, "num_heads": HEADS, "head_dim": HEAD_DIM, "dtype": torch.float32}
    with ContextParallel(mask=Mask(causal=True, documents=(0, 9, 10, 37)), **sizes) as cp:  # type: ignore[arg-type]
        batch = sharded(cp, replace(PACKED, given={}))
        whole = [cp.unshard(batch[name], 1) for name in ("labels", "position_ids")]
        logits = cp.unshard(logits_of(cp, make_model(), batch), 1)
        with torch.no_grad():
            wanted = make_model()(PACKED.input_ids, PACKED.positions, PACKED.attention)
        told = [refusal(lambda case=case: sharded(cp, case)) for case in (PLAIN, POSITIONS)]
        return [
            batch.documents is None,
            torch.equal(whole[0], PACKED.targets),
            torch.equal(whole[1], PACKED.positions),
            (logits - wanted).abs().max().item() < 1e-5,
            all("has documents already" in one for one in told),
        ]


def test_an_object_for_one_mask_shards_batches_by_it(pool: WorkerPool) -> None:
    assert pool.run(by_the_object, 2) == [[True] * 5] * 2


# What is refused.


def refusal(action: Any) -> str:
    try:
        action()
    except MeshAttentionError as error:
        return str(error)
    return "nothing"


def refused(rank: int, world_size: int) -> dict[str, str]:
    with make() as cp:
        batch = sharded(cp, PACKED)
        ids, labels = PLAIN.input_ids, PLAIN.labels
        logits = torch.zeros(2, 19, VOCABULARY)
        loss: Any = cp.cross_entropy
        return {
            "the batch": refusal(lambda: cp.shard_batch(**batch)),
            "moved": refusal(lambda: cp.shard_batch(**batch.to("cpu"))),
            "for models": refusal(lambda: cp.shard_batch(**batch.model_inputs())),
            "a tensor": refusal(lambda: cp.shard_batch(input_ids=batch.input_ids)),
            "length": refusal(lambda: cp.shard_batch(input_ids=ids[:, :10], cu_seqlens=[0, 19])),
            "next tokens": refusal(
                lambda: cp.shard_batch(input_ids=ids[:, :-1], labels=ids[:, 1:])
            ),
            "4-D": refusal(
                lambda: cp.shard_batch(input_ids=ids, attention_mask=torch.ones(2, 1, 19, 19))
            ),
            "shift_labels": refusal(lambda: cp.shard_batch(input_ids=ids, shift_labels=labels)),  # type: ignore[arg-type]
            "1-D": refusal(lambda: cp.shard_batch(input_ids=ids[0])),
            "others": refusal(lambda: cp.shard_batch(input_ids=ids, x=torch.ones(19))),
            "other starts": refusal(
                lambda: sharded(cp, PACKED, cu_seqlens=[0, 9, 37], documents=batch.documents)
            ),
            "the same": refusal(lambda: sharded(cp, PACKED, documents=batch.documents)),
            "documents": refusal(lambda: sharded(cp, PLAIN, documents=batch.documents)),
            "reduce": refusal(lambda: loss(logits, labels, reduce="mean")),
            "shapes": refusal(lambda: loss(logits[:, :5], labels, reduce="sum")),
            "no labels": refusal(lambda: loss(logits, None, reduce="sum")),
        }


def test_a_batch_that_was_sharded_and_whatever_does_not_fit_is_refused_by_name(
    pool: WorkerPool,
) -> None:
    """Needs 6 and 12."""
    for told in pool.run(refused, 2):
        for name in ("the batch", "moved", "for models", "a tensor"):
            assert "a batch is sharded once" in told[name]
        assert "only once" in told["length"]
        assert "shift_labels=False" in told["next tokens"]
        assert "attention_mask has shape (2, 1, 19, 19)" in told["4-D"]
        assert "shift_labels is True or False" in told["shift_labels"]
        assert "input_ids is (19,)" in told["1-D"]
        assert "x has shape (19,)" in told["others"]
        assert "not those of the batch" in told["other starts"]
        assert told["the same"] == "nothing"
        assert "37 tokens in a row, and the batch has 19" in told["documents"]
        assert "'mean': must be one of ddp, fsdp, sum" in told["reduce"]
        assert "(batch, local tokens, vocabulary)" in told["shapes"]
        assert "targets is None" in told["no labels"]


def other_batch(rank: int, world_size: int, name: str, warm: bool) -> list[Any]:
    model = make_model()
    with make() as cp:
        if warm:
            logits_of(cp, model, sharded(cp, PLAIN))
        given = {"input_ids": PACKED.input_ids, "labels": PACKED.labels, **PACKED.given}
        if rank == 1:
            given[name] = given[name].clone()
            given[name][0, 5] += 1
        told = [refusal(lambda: logits_of(cp, model, cp.shard_batch(**given)))]
        again = sharded(cp, PACKED)
        mean: TokenMean = cp.cross_entropy(logits_of(cp, model, again), again.labels, reduce="sum")
        return [*told, mean.value.item()]


@pytest.mark.parametrize(("name", "warm"), [("input_ids", False), ("labels", True)])
def test_a_rank_with_another_batch_is_named_and_nothing_is_broken(
    pool: WorkerPool, name: str, warm: bool
) -> None:
    """Need 12."""
    [[(wanted, _)]] = pool.run(truth, 1, [[PACKED]])
    for told, later in pool.run(other_batch, 3, name, warm):
        assert told.startswith("rank 1 of the group")
        assert name in told
        assert abs(later - wanted) < 1e-5


def other_loss(rank: int, world_size: int, mistake: str) -> str:
    with make() as cp:
        batch = sharded(cp, PLAIN)
        logits = torch.zeros(*batch.position_ids.shape, VOCABULARY)
        cp.cross_entropy(logits, batch.labels, reduce="sum")
        if rank == 1 and mistake == "shape":
            return refusal(lambda: cp.cross_entropy(logits[:, 1:], batch.labels, reduce="sum"))
        reduce: Any = "ddp" if rank == 1 else "sum"
        return refusal(lambda: cp.cross_entropy(logits, batch.labels, reduce=reduce))


@pytest.mark.parametrize("mistake", ["shape", "reduce"])
def test_a_rank_whose_loss_is_another_is_named(pool: WorkerPool, mistake: str) -> None:
    own = "(batch, local tokens, vocabulary)" if mistake == "shape" else "cross_entropy is 'ddp'"
    for told in pool.run(other_loss, 3, mistake):
        assert own in told
        assert "rank 1" in told or mistake == "shape"


def no_target(rank: int, world_size: int) -> list[float]:
    with make() as cp:
        batch = sharded(cp, PLAIN, labels=torch.full_like(PLAIN.labels, -100))
        logits = torch.zeros(*batch.position_ids.shape, VOCABULARY, requires_grad=True)
        mean = cp.cross_entropy(logits, batch.labels, reduce="ddp")
        mean.loss.backward()  # type: ignore[no-untyped-call]
        assert logits.grad is not None
        return [mean.loss.item(), mean.value.item(), logits.grad.abs().max().item()]


def test_a_batch_without_any_target_has_a_loss_of_zero(pool: WorkerPool) -> None:
    assert pool.run(no_target, 2) == [[0.0] * 3] * 2


def smoothed(rank: int, world_size: int, dtype: torch.dtype) -> float:
    logits = torch.randn(2, 19, VOCABULARY, generator=torch.Generator().manual_seed(0)).to(dtype)
    with make() as cp:
        batch = sharded(cp, PLAIN)
        mine = cp.shard(logits, 1, documents=batch.documents)
        mean = cp.cross_entropy(mine, batch.labels, reduce="sum", label_smoothing=0.1)
        true = cross_entropy(
            logits.double().flatten(0, 1), PLAIN.targets.flatten(), label_smoothing=0.1
        )
        return abs(mean.value.item() - true.item())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_lose_nothing_and_labels_are_smoothed_as_torch_does(
    pool: WorkerPool, dtype: torch.dtype
) -> None:
    assert max(pool.run(smoothed, 2, dtype)) < 1e-6
