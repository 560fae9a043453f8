"""`doctor`: mistakes are really made, one at a time, and it names each, with the first module that
differs; where nothing is wrong it says so, and leaves nothing behind."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from mesh_attention import ContextParallel, MeshAttentionError, doctor
from support.pool import WorkerPool
from support.sample import sample

TOKENS, WIDTH, HEADS, VOCABULARY = 32, 16, 2, 23
STARTS = (0, 12, 32)


class Block(nn.Module):
    """With RoPE, and what tests ask for beside attention."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3) if fault == "convolution" else None
        self.drop = nn.Dropout(0.5) if fault == "dropout" else None

    def forward(self, x: Tensor, positions: Tensor, attention: Callable[..., Tensor]) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).unbind(2)
        q, k = rotated(q, positions), rotated(k, positions)
        if "heads first" in self.fault:
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
            x = x + self.out(attention(q, k, v).transpose(1, 2).flatten(2))
        else:
            x = x + self.out(attention(q, k, v).flatten(2))
        if self.conv is not None:
            x = x + self.conv(functional.pad(x.transpose(1, 2), (2, 0))).transpose(1, 2)
        if self.drop is not None:
            x = functional.dropout(self.drop(x), 0.1, True)
        if self.fault == "noise":
            x = x * (torch.rand_like(x) > 0.5)
        return x.cumsum(1) / 10 if self.fault == "running sum" else x


def rotated(x: Tensor, positions: Tensor) -> Tensor:
    angles = positions[..., None, None] / 10 ** torch.linspace(0, 2, x.shape[-1] // 2)
    a, b = x.chunk(2, -1)
    turned = [a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()]
    return torch.cat(turned, -1).to(x.dtype)


class Model(nn.Module):
    def __init__(self, fault: str) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.learned = nn.Embedding(TOKENS, WIDTH) if fault == "learned positions" else None
        self.blocks = nn.ModuleList(Block(fault) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor, positions: Tensor, attention: Callable[..., Tensor]) -> Tensor:
        x = self.token(ids)
        if self.learned is not None:
            x = x + self.learned(positions)
        for block in self.blocks:
            x = block(x, positions, attention)
        logits: Tensor = self.head(x)
        return logits


def plain_attention(starts: tuple[int, ...]) -> Callable[..., Tensor]:
    owner = torch.bucketize(torch.arange(starts[-1]), torch.tensor(starts[1:-1]), right=True)
    sees = (owner[:, None] == owner) & torch.ones(starts[-1], starts[-1]).tril().bool()

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads_first = q.shape[1] == HEADS
        q, k, v = (x if heads_first else x.transpose(1, 2) for x in (q, k, v))
        out = functional.scaled_dot_product_attention(q, k, v, attn_mask=sees)
        return out if heads_first else out.transpose(1, 2)

    return attention


def made_model(fault: str, rank: int) -> Any:
    torch.manual_seed(0)
    model = Model(fault)
    if "bf16" in fault:
        model = model.bfloat16()
    wrapped = model if "not reduced" in fault else DistributedDataParallel(model)
    if "frozen" in fault:
        model.head.weight.requires_grad_(rank == 0)
    if fault == "other weights":
        with torch.no_grad():
            model.head.weight.copy_(model.head.weight.roll(rank, 0))  # the same rows elsewhere
    return wrapped


def case(fault: str, rank: int, size: int) -> dict[str, Any]:
    """What doctor is asked, with a mistake in the step on ranks."""
    model = made_model(fault, rank)
    chance = torch.Generator().manual_seed(rank if fault == "batches" else 0)
    ids = torch.randint(1, VOCABULARY, (1, TOKENS), generator=chance)
    labels = ids.clone()
    labels[:, 3:9] = -100
    batch = {"input_ids": ids, "labels": labels}
    starts = STARTS if "documents" in fault else (0, TOKENS)
    sizes: Any = {"seq_len": TOKENS, "layout": "zigzag"} if fault == "contiguous by hand" else {}
    if "own length" in fault:
        sizes = {"seq_len": TOKENS}
    cp: Any = ContextParallel(causal=True, **sizes)
    if "own length" in fault:  # of which others are cut too
        cp.shard(ids, 1)

    def step(model: Any, whole: dict[str, Tensor]) -> Any:
        if "by hand" in fault:
            ids, labels = (x.chunk(size, 1)[rank] for x in (whole["input_ids"], whole["labels"]))
            positions = torch.arange(TOKENS).chunk(size)[rank][None]
            attend = cp.attention
        else:
            said = {"cu_seqlens": STARTS} if "documents" in fault else {}
            part = cp.shard_batch(**whole, **said)
            ids, labels, positions = part.input_ids, part.labels, part.position_ids
            handle = None if "documents" in fault else part.documents
            attend = lambda *x: cp.attention(*x, documents=handle)  # noqa: E731
        if fault == "other tokens" and rank == 1:
            ids = ids.roll(1, 1)
        if fault == "own attention":
            attend = plain_attention((0, ids.shape[1]))
        if fault in ("positions", "learned positions"):
            positions = torch.arange(ids.shape[1])[None]
        logits = model(ids, positions, attend)
        if fault == "labels twice":
            logits, labels = logits[:, :-1], labels[:, 1:]
            return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        if fault == "noise of the step":
            logits = logits + torch.randn_like(logits)
        reduce: Any = "sum" if fault in ("scaled down", "not reduced") else "ddp"
        mean = cp.cross_entropy(logits.contiguous(), labels.contiguous(), reduce=reduce)
        scales = {"scaled up": size, "bf16, scaled by 1.1": 1.1}
        return mean.loss * scales[fault] if fault in scales else mean

    def plain(model: Any, whole: dict[str, Tensor]) -> Tensor:
        positions = torch.cat([torch.arange(b - a) for a, b in pairwise(starts)])[None]
        logits = model(whole["input_ids"], positions, plain_attention(starts))
        targets = whole["labels"].roll(-1, 1)
        targets[:, [end - 1 for end in starts[1:]]] = -100
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    return {"step": step, "whole_batch": batch, "model": model, "cp": cp, "plain": plain}


def diagnosed(rank: int, size: int, faults: list[str]) -> dict[str, tuple[str, str | None, str]]:
    answers: dict[str, tuple[str, str | None, str]] = {}
    for fault in faults:
        asked = case(fault, rank, size)
        report = doctor(**asked)
        asked["cp"].close()
        read = json.loads(report.to_json())
        assert read["is_right"] == report.is_right
        assert report.notes == () or "dropout" in fault
        answers[fault] = (report.cause.kind, report.cause.where, str(report))
    return answers


WANTED = {  # before anything is cut calls know less, and after it more, of what is meant
    "heads first, by hand": ("heads first", "blocks.0", "give x.transpose(1, 2) of q, k and v"),
    "documents": ("error", None, "call attention(..., documents=...)"),
    "nothing": ("nothing", None, "ranks compute what one process does"),
    "positions": ("positions", "blocks.0", "q and k of attention differ and v does not"),
    "learned positions": ("positions", "learned", "counted from 0 on each rank"),
    "contiguous by hand": ("layout", "token", "tokens lie in contiguous shards"),
    "documents, own length": ("documents", "blocks.0", "tokens see those of other documents"),
    "own attention": ("attention", "blocks.0", "PyTorch's, which sees the tokens of this rank"),
    "running sum": ("token mixing", "blocks.0", "after blocks.0.out, on ranks [0, 1] of the group"),
    "other weights": ("parameters", "head.weight", "of rank 1 is not that of rank 0"),
    "not reduced, frozen on a rank": ("parameters", "head.weight", "freeze or evaluate it on all"),
    "other tokens": ("batches", "token", "token gives other numbers on ranks [1] of the group"),
    "noise of the step": ("randomness", "the step", "the step draws random numbers"),
    "not reduced, to average": ("gradients not reduced", "token.weight", "only their mean is that"),
    "bf16": ("nothing", None, "ranks compute what one process does"),
    "bf16, scaled by 1.1": ("gradient scale", "token.weight", "are 1.1"),
    "heads first": ("error", None, "expected (1, 16, 16, 8) = (batch, local_seq, heads, head_dim)"),
    "scaled down": ("gradient scale", "token.weight", "1/2 (one over the ranks) times"),
    "scaled up": ("gradient scale", "token.weight", "2 (the ranks) times"),
    "not reduced": ("gradients not reduced", "token.weight", "only their sum is that of one"),
    "labels twice": ("labels", None, "labels are shifted twice"),
    "dropout": ("nothing", None, "dropout was left out, of blocks.0.drop, blocks.1.drop, blocks.0"),
    "noise": ("randomness", "blocks.0", "blocks.0 draws random numbers or is given some"),
    "batches": (
        "batches",
        None,
        "batches of ranks [1] of the group are not that of rank 0: input_ids",
    ),
    "convolution": ("token mixing", "blocks.0.conv", "other numbers, on ranks [0, 1] of the group"),
}
# Each is found in the way that another one is, whose name is not here.
VARIANTS = (
    "learned positions",
    "documents, own length",
    "not reduced, frozen on a rank",
    "not reduced, to average",
    "bf16",
    "bf16, scaled by 1.1",
    "heads first",
    "scaled down",
    "noise",
)


@pytest.mark.parametrize(
    "faults",
    [
        pytest.param([fault for fault in WANTED if fault not in VARIANTS], id="kinds"),
        pytest.param([*VARIANTS], id="variants", marks=pytest.mark.slow),
    ],
)
def test_every_mistake_is_named_with_the_first_module_that_differs(
    pool: WorkerPool, faults: list[str]
) -> None:
    first, second = pool.run(diagnosed, 2, faults)
    assert first == second
    wrong = {
        fault: answer
        for fault, answer in first.items()
        if answer[:2] != WANTED[fault][:2] or WANTED[fault][2] not in answer[2]
    }
    assert [*first] == faults
    assert wrong == {}


def state(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    tensors: list[Any] = [*model.parameters(), *(p.grad for p in model.parameters())]
    tensors += [x for held in optimizer.state.values() for x in held.values()]
    return [getattr(x, "_local_tensor", x).clone() for x in tensors] + [torch.get_rng_state()]


def in_the_middle(rank: int, size: int, way: str) -> list[str]:
    """Of a training on data-parallel by context-parallel ranks with batches of their own."""
    from torch.distributed.fsdp import fully_shard

    mesh = dist.device_mesh.init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("dp", "cp"))
    torch.manual_seed(0)
    plain = Model("dropout")
    model: Any = DistributedDataParallel(plain)
    reduce: Any = "ddp"
    if way == "fsdp":
        model, reduce = fully_shard(plain), "sum"
        model.set_gradient_divide_factor(1)
        model.set_force_sum_reduction_for_comms(True)  # gloo scales nothing
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.randint(1, VOCABULARY, (2, 21), generator=torch.Generator().manual_seed(rank // 2))
    real = torch.arange(21) < torch.tensor([[21], [13]])
    batch = {"input_ids": ids, "labels": ids.masked_fill(~real, -100), "attention_mask": real}
    cp: Any
    with ContextParallel(mesh["cp"], causal=True, layout="contiguous") as cp:

        def step(model: Any, whole: Any, fault: bool = False) -> Any:
            part = cp.shard_batch(**whole)
            attend = lambda *x: cp.attention(*x, documents=part.documents)  # noqa: E731
            counted = torch.arange(part.input_ids.shape[1])[None]
            positions = counted if fault else part.position_ids
            logits = model(part.input_ids, positions, attend)
            how = {"reduce": reduce, "data_parallel": mesh["dp"]}
            return cp.cross_entropy(logits, part.labels, **how)

        for _ in range(2):
            step(model, batch).loss.backward()
            optimizer.step()
        before = state(model, optimizer)
        answers: list[str] = []
        long = {"input_ids": ids.reshape(1, 42), "labels": ids.reshape(1, 42)}
        # Rows lie on one rank each, and have the right distances also if counted there.
        for wrong, whole in (False, batch), (True, batch), (True, long), (False, batch):
            report = doctor(lambda m, x: step(m, x, wrong), whole, model, cp)  # noqa: B023
            answers.append(report.cause.kind)
            for a, b in zip(state(model, optimizer), before, strict=True):
                assert torch.equal(a, b)
        assert "plain= shows more" in report.notes[0]
        assert max(report.gradients.values()) < 1e-5  # type: ignore[union-attr]
        step(model, batch).loss.backward()  # and training goes on
    return answers


@pytest.mark.parametrize("way", sample(["fsdp", "ddp"], 2))
def test_a_training_is_as_before_and_needs_no_other_code(pool: WorkerPool, way: str) -> None:
    """Its step runs on one process too; batches of padded rows, packed on ranks."""
    for answers in pool.run(in_the_middle, 4, way):
        assert answers == ["nothing", "nothing", "positions", "nothing"]


def changing(rank: int, size: int) -> list[str]:
    """Gradients are added up by hand; a step that trains, or returns no loss, is refused."""
    asked = case("not reduced", rank, size)
    step = asked.pop("step")

    def add_up(model: Any) -> None:
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)

    def clips(model: Any, by_norm: bool = True) -> None:
        """Each rank by its own norm, or its own largest numbers."""
        norms = [(p.grad, p.grad.norm()) for p in model.parameters()]
        total = torch.stack([norm for _, norm in norms]).norm()
        for grad, norm in norms:
            if by_norm:
                grad.mul_((rank + 1) * 0.01 / total)
            else:
                grad.clamp_(-0.5 * norm / grad.numel() ** 0.5, 0.5 * norm / grad.numel() ** 0.5)
        add_up(model)

    def trains(model: Any, whole: Any) -> Any:
        mean = step(model, whole)
        with torch.no_grad():
            model.head.weight.mul_(1.0)
        return mean

    answers: list[str] = [doctor(step, reduce_gradients=add_up, **asked).cause.kind]
    clipped = doctor(step, reduce_gradients=clips, **asked).cause
    assert clipped.kind == "clipping"
    assert clipped.words.startswith("reduce_gradients multiplies the gradients of ranks by ")
    bounded = doctor(step, reduce_gradients=partial(clips, by_norm=False), **asked).cause
    assert bounded.kind == "gradients"
    assert "what reduce_gradients makes of them is not" in bounded.words
    with pytest.raises(MeshAttentionError, match="step changes parameters"):
        doctor(trains, reduce_gradients=add_up, **asked)
    for wrong in (lambda *x: step(*x).value.item(), lambda *x: step(*x).loss.backward()):
        answers.append(doctor(wrong, **asked).cause.words)
    asked["cp"].close()
    return answers


def test_steps_that_train_or_return_no_loss_are_refused(pool: WorkerPool) -> None:
    for kind, words, of_backward in pool.run(changing, 2):
        assert kind == "nothing"
        assert "step returns no loss" in words
        assert "step calls backward" in of_backward


def differing_in_a_group(rank: int, size: int) -> list[tuple[str, str]]:
    """Only the first of two context-parallel groups has ranks that differ."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("dp", "cp"))

    def refused(*_: Any) -> Any:
        raise AssertionError("the step ran")

    def answer(ids: Tensor, model: nn.Module) -> tuple[str, str]:
        with ContextParallel(mesh["cp"], causal=True) as cp:
            cause = doctor(refused, {"input_ids": ids}, model, cp).cause
        return cause.kind, cause.words

    torch.manual_seed(0)
    model = Model("")
    batches = answer(torch.full((1, 8), rank % 2 if rank < 2 else 5), model)
    model.head.weight.requires_grad_(rank != 0)
    return [batches, answer(torch.zeros(1, 8).long(), model)]


def test_what_differs_in_a_data_parallel_group_is_told_on_all_ranks(pool: WorkerPool) -> None:
    answers = pool.run(differing_in_a_group, 4)
    assert all(answer == answers[0] for answer in answers)
    (batches, words), (parameters, of_parameters) = answers[0]
    assert (batches, parameters) == ("batches", "parameters")
    assert words.startswith("batches of ranks [1] of the group are not that of rank 0: input_ids")
    assert of_parameters.startswith("head.weight of rank 1 is not that of rank 0")
