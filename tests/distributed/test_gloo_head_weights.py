"""The weight of a head that others hold or reduce: DDP, FSDP2 in every form, adapters; its gradient
is that of one process, or it is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from mesh_attention import ContextParallel
from support.head_case import error, head
from support.pool import WorkerPool
from support.tiny_gpt import VOCABULARY, Model, one_process
from support.training import FEW, PACKED, PLAIN, RATE, RIGHT, Trained, refusal, sharded


class ModelWithLoss(Model):
    """Its head is its embedding; the loss is made where the weight is whole."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.token.weight

    def forward(self, *inputs: Any, loss: Callable[..., Any] | None = None) -> Any:
        if loss is None:
            return super().forward(*inputs)
        head: Any = self.head
        self.head = torch.nn.Identity()  # type: ignore[assignment]
        try:
            hidden = super().forward(*inputs)
        finally:
            self.head = head
        return loss(hidden, head.weight, bias=head.bias)


def tied_model() -> ModelWithLoss:
    torch.manual_seed(0)
    return ModelWithLoss()


STEPS = [[PACKED, RIGHT], [FEW, PLAIN]]


def tied_truth(rank: int, world_size: int) -> Trained:
    return one_process(STEPS, RATE, tied_model())


# Who wraps the model, over which mesh, and whether the loss is made outside of forward, from a
# weight that is in parts again.
WAYS: dict[str, tuple[str, bool]] = {
    "ddp": ("", False),
    "fsdp": ("dp_cp", False),
    "fsdp, gathered": ("dp_cp", True),
    "hsdp, gathered, accumulated": ("dp, cp", True),
    "fsdp, log_probs, mixed precision": ("dp_cp", True),
}


def policy_loss(
    cp: ContextParallel, labels: Tensor, mean_of: Any, hidden: Tensor, weight: Tensor, **bias: Any
) -> Any:
    """The same number by other means."""
    new, _ = cp.log_probs(hidden, labels, weight=weight, reduce=mean_of["reduce"], **bias)
    return cp.token_mean(-new, labels != -100, **mean_of)


def by_framework(rank: int, world_size: int, name: str) -> Trained:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    model: Any = tied_model()
    over, outside = WAYS[name]
    if name == "ddp":
        model = DistributedDataParallel(model)
    else:
        flat: Any = mesh["dp", "cp"]._flatten("dp_cp")
        how: dict[str, Any] = {"mesh": flat if over == "dp_cp" else mesh["dp", "cp"]}
        if "mixed" in name:
            how["mp_policy"] = MixedPrecisionPolicy(torch.float64, torch.float64)
        for block in model.blocks:
            fully_shard(block, **how)
        fully_shard(model, **how)
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    times, steps = 2 if "accumulated" in name else 1, []
    with ContextParallel(mesh["cp"], causal=True) as cp:
        for cases in STEPS:
            optimizer.zero_grad()
            batch = sharded(cp, cases[rank // 2])
            assert batch.labels is not None
            assert batch.num_targets is not None
            total = batch.num_targets * times
            dist.all_reduce(total, group=mesh["dp"].get_group())
            mean_of: dict[str, Any] = {
                "reduce": "ddp" if name == "ddp" else "fsdp",
                "data_parallel": mesh["dp"],
                "num_targets": total,
            }
            loss: Any = partial(
                cp.linear_cross_entropy, labels=batch.labels, chunk_tokens=5, **mean_of
            )
            if "log_probs" in name:
                loss = partial(policy_loss, cp, batch.labels, mean_of)

            def attention(q: Tensor, k: Tensor, v: Tensor, batch: Any = batch) -> Any:
                return cp.attention(q, k, v, documents=batch.documents)

            for time in range(times):
                inputs = (batch.input_ids, batch.position_ids, attention)
                if times > 1:
                    model.set_requires_gradient_sync(time == times - 1)
                if outside:
                    hidden = model(*inputs, loss=lambda x, *_, **__: x)
                    if time == 0:  # otherwise the weight of a root module is whole after forward
                        model.reshard()
                    weight = model.head.weight
                    assert hasattr(weight, "full_tensor") == (time == 0)
                    mean = loss(hidden, weight, bias=model.head.bias)
                else:
                    mean = model(*inputs, loss=loss)
                mean.loss.backward()
            grads: list[Any] = [p.grad for p in model.parameters()]
            grads = [g.full_tensor() if hasattr(g, "full_tensor") else g.clone() for g in grads]
            steps.append((times * mean.value.item(), grads))
            optimizer.step()
        if name == "fsdp, gathered":
            message = refusal(lambda: loss(hidden, weight, data_parallel=None, num_targets=None))
            assert "give the others as data_parallel" in message, message
            # A call ends with an error in one replica, while the other waits to gather.
            message = refusal(
                lambda: loss(hidden, weight, labels=None if rank > 1 else batch.labels)
            )
            if rank > 1:
                message = refusal(lambda: loss(hidden, weight, label="next"))
            assert "number of calls that gather over these ranks is" in message, message
    return steps


@pytest.mark.parametrize("name", WAYS)
def test_a_tied_weight_gets_its_gradient_under_ddp_and_fsdp(pool: WorkerPool, name: str) -> None:
    [wanted] = pool.run(tied_truth, 1)
    for steps in pool.run(by_framework, 4, name):
        for (loss, grads), (true_value, true_grads) in zip(steps, wanted, strict=True):
            assert abs(loss - true_value) < 1e-5 * true_value
            for a, b in zip(grads, true_grads, strict=True):
                assert (a - b).abs().max() <= 1e-5 * b.abs().max() + 1e-7


def of_a_sharded_head(rank: int, world_size: int) -> list[str]:
    """What is wrong: in float64, of a head that never has a forward pass of its own, with gradients
    that are added up; and what is refused, on all ranks, with a call after it."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "cp"))
    whole = torch.nn.Linear(8, VOCABULARY, dtype=torch.float64)
    torch.manual_seed(0)
    whole.load_state_dict({k: torch.randn_like(x) for k, x in whole.state_dict().items()})
    parts: Any = torch.nn.Linear(8, VOCABULARY, dtype=torch.float64)
    parts.load_state_dict(whole.state_dict())
    fully_shard(parts, mesh=mesh["cp"])
    with ContextParallel(mesh["cp"], causal=True) as cp:
        batch = sharded(cp, PACKED)
        hidden = cp.shard(head(PACKED)[0], 1, documents=batch.documents)
        loss: Any = partial(cp.linear_cross_entropy, hidden, reduce="sum")
        assert batch.labels is not None
        labels, alike = batch.labels, {"labels": batch.labels}
        messages = [
            refusal(lambda: loss(parts.weight, labels=None if rank else labels, bias=parts.bias)),
            refusal(lambda: loss(parts.weight if rank else whole.weight, **alike)),
            refusal(lambda: loss(distribute_tensor(whole.weight, mesh["cp"], [Shard(1)]), **alike)),
            refusal(lambda: loss(distribute_tensor(whole.weight, mesh, [Shard(0)] * 2), **alike)),
            refusal(lambda: cp.log_probs(hidden, labels, weight=parts.weight)),
            refusal(lambda: cp.log_probs(hidden, labels, reduce="mean")),  # type: ignore[arg-type]
        ]
        adapters = [torch.randn(shape).double() for shape in ((VOCABULARY, 2), (2, 8))]
        in_parts = [distribute_tensor(x, mesh["cp"], [Shard(0)]) for x in adapters]
        for layer, adapter in ((whole, adapters), (parts, in_parts)):
            up, down = (x.requires_grad_() for x in adapter)
            mean = loss(layer.weight + up @ down, bias=layer.bias, **alike)
            mean.loss.backward()
        trained = zip(
            [*whole.parameters(), *adapters], [*parts.parameters(), *in_parts], strict=True
        )
        for x, y in trained:
            assert x.grad is not None
            dist.all_reduce(x.grad)
            assert error(y.grad.full_tensor(), x.grad) < 1e-12
        pair = hidden[..., :2].detach(), adapters[0].detach() if rank else in_parts[0].detach()
        messages.append(refusal(lambda: loss(parts.weight, low_rank=pair, **alike)))
        log_probs = partial(cp.log_probs, hidden, weight=parts.weight, reduce="sum")
        made = [log_probs(labels)[0].sum() for _ in range(2)]
        # A rank leaves out the first backward pass.
        messages.append(refusal(lambda: made[rank].backward()))  # type: ignore[no-untyped-call]
    return messages


def test_a_head_in_parts_is_exact_or_refused_by_name(pool: WorkerPool) -> None:
    for messages in pool.run(of_a_sharded_head, 2, group_seconds=10.0):
        wanted = ["targets is None", "weight in parts is", *["in the forward of the module"] * 2]
        wanted += ["say reduce='fsdp'", "reduce='mean': must be", "low_rank[1] in parts is"]
        wanted += ["number of its forward call is"]
        assert all(words in text for words, text in zip(wanted, messages, strict=True)), messages
