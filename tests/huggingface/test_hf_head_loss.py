"""The loss in the head of a model is the one of its logits, whatever the model does with those, or
the logits are asked for. One process, no ranks: one that has imported transformers already."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from mesh_attention.train.means import TokenMean
from support.pool import WorkerPool

if TYPE_CHECKING:
    from mesh_attention.huggingface.head_loss import ModelLoss

TARGETS = torch.tensor([[3, 0, 4], [1, 5, 2]])

AFTER: dict[str, Callable[[Tensor], Tensor]] = {
    "nothing": lambda x: x,
    "scaled": lambda x: x / 3.0,
    "softcap": lambda x: 1.5 * torch.tanh(x / 1.5),
    "both": lambda x: 2.0 * torch.tanh(x * 0.3 / 2.0),
    "in 16 bits": lambda x: (x.bfloat16() * 0.7).float(),
    "shifted": lambda x: x + 1.0,
    "padded": lambda x: x.masked_fill(torch.arange(x.shape[-1]) == 6, -9.0),
    "cut": lambda x: x[..., :-1],
}


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Linear(5, 4)

    def forward(self, input_ids: Tensor, **_: Any) -> Any:
        from transformers.modeling_outputs import BaseModelOutput

        return BaseModelOutput(self.matrix(input_ids).tanh())


class Model(nn.Module):
    def __init__(self, after: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base_model, self.lm_head, self.after = Layers(), nn.Linear(4, 7), after

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(self, input_ids: Tensor, **_: Any) -> Any:
        from transformers.modeling_outputs import CausalLMOutput

        hidden = self.base_model(input_ids).last_hidden_state
        return CausalLMOutput(logits=self.after(self.lm_head(hidden)))


class Losses:
    """What is asked of a `ModelContextParallel`."""

    def __init__(self, model: nn.Module) -> None:
        self.model: Any = model
        self.cannot_be_copied = (x for x in range(0))  # as a process group
        self.calls: list[str] = []

    def linear_cross_entropy(
        self,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        bias: Tensor | None,
        softcap: float | None,
        low_rank: tuple[Tensor, Tensor] | None,
    ) -> TokenMean:
        logits = nn.functional.linear(hidden, weight, bias)
        if low_rank is not None:
            logits = logits + low_rank[0] @ low_rank[1].T
        logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
        mean = self.cross_entropy(logits, labels)
        self.calls[-1] = "in head"
        return mean

    def cross_entropy(self, logits: Tensor, labels: Tensor) -> TokenMean:
        self.calls.append("of logits")
        loss = cross_entropy(logits.flatten(0, 1), labels.flatten())
        return TokenMean(loss, loss.detach(), torch.tensor(labels.numel()))


def losses_of(model: nn.Module) -> tuple[ModelLoss, Losses]:
    from mesh_attention.huggingface.head_loss import ModelLoss

    losses = Losses(model)
    return ModelLoss(losses), losses  # type: ignore[arg-type]


def is_in_head(model: Model) -> bool:
    return "forward" in vars(model.lm_head)


def gradients(model: nn.Module, loss: Tensor) -> list[Tensor]:
    model.zero_grad()
    (3 * loss).backward()  # type: ignore[no-untyped-call]
    return [
        parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None
    ]


def loss_in_head(rank: int, world_size: int, name: str) -> None:
    model, x = Model(AFTER[name]), torch.randn(2, 3, 5)
    logits = model(x).logits
    loss = cross_entropy(logits.flatten(0, 1), TARGETS.flatten())
    wanted = gradients(model, loss)
    model_loss, losses = losses_of(model)
    assert is_in_head(model) == (name not in ("in 16 bits", "shifted", "padded", "cut"))
    if not is_in_head(model):
        assert torch.equal(model(x).logits, logits)
        return
    for _ in range(2):
        mean, _ = model_loss.mean(model, {"input_ids": x}, TARGETS)
        assert losses.calls.pop() == "in head"
        torch.testing.assert_close(mean.loss, loss.detach(), check_stride=False)
        for grad, true in zip(gradients(model, mean.loss), wanted, strict=True):
            torch.testing.assert_close(grad, true)
    twin = copy.deepcopy(model)  # with a head of its own
    nn.init.zeros_(twin.lm_head.weight)
    assert (twin(x).logits != model(x).logits).any()
    model_loss.remove()
    assert torch.equal(model(x).logits, logits)


@pytest.mark.parametrize("name", AFTER)
def test_the_loss_is_that_of_the_logits_or_they_are_asked_for(
    model_pool: WorkerPool, name: str
) -> None:
    model_pool.run(loss_in_head, 1, name)


def with_lora(**how: Any) -> Any:
    """A model whose head has two adapters, both of which count."""
    from peft import LoraConfig, inject_adapter_in_model

    model: Any = Model(AFTER["both"])
    first = LoraConfig(r=2, lora_alpha=3, target_modules=["lm_head"], **how)
    second = LoraConfig(r=1, lora_alpha=1, target_modules=["lm_head"])
    for name, config in {"first": first, "second": second}.items():
        inject_adapter_in_model(config, model, adapter_name=name)
    adapters = model.lm_head
    adapters.set_adapter(["first", "second"])
    for matrix in (*adapters.lora_A.values(), *adapters.lora_B.values()):
        nn.init.normal_(matrix.weight)
    model.requires_grad_()
    return model


def head_with_adapters(rank: int, world_size: int) -> None:
    model, x = with_lora(), torch.randn(2, 3, 5)
    model_loss, losses = losses_of(model)
    for disabled in (False, True):
        model.lm_head.enable_adapters(not disabled)
        logits = model(x).logits
        loss = cross_entropy(logits.flatten(0, 1), TARGETS.flatten())
        wanted = gradients(model, loss)
        mean, _ = model_loss.mean(model, {"input_ids": x}, TARGETS)
        assert losses.calls.pop() == "in head"
        torch.testing.assert_close(mean.loss, loss.detach(), check_stride=False)
        for grad, true in zip(gradients(model, mean.loss), wanted, strict=True):
            torch.testing.assert_close(grad, true)


def test_a_head_with_adapters_makes_the_loss_without_logits(model_pool: WorkerPool) -> None:
    model_pool.run(head_with_adapters, 1)


def other_adapters(rank: int, world_size: int) -> list[str]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("mesh_attention")
    logger.addHandler(handler)
    model = with_lora(use_dora=True)
    losses_of(model)
    logger.removeHandler(handler)
    assert not is_in_head(model)
    return lines


def test_a_head_with_other_adapters_is_left_alone_by_name(model_pool: WorkerPool) -> None:
    [lines] = model_pool.run(other_adapters, 1)
    assert any("adapter first of its head is no plain LoRA" in line for line in lines)


def other_heads(rank: int, world_size: int) -> None:
    model, x = Model(AFTER["nothing"]), torch.randn(2, 3, 5)
    model_loss, losses = losses_of(model)
    model.after = lambda logits: logits + 0 * model.lm_head(model.base_model(x)[0]).sum()
    model_loss.mean(model, {"input_ids": x}, TARGETS)
    assert losses.calls[-1] == "of logits"
    assert not is_in_head(model)
    model.after = AFTER["nothing"]
    hook = model.lm_head.register_forward_hook(lambda *_: None)  # it would see no logits
    losses_of(model)
    assert not is_in_head(model)
    hook.remove()
    setattr(model, "lm_head", nn.Sequential(model.lm_head))  # noqa: B010
    losses_of(model)
    assert not is_in_head(model)


def test_other_heads_and_heads_that_are_called_twice_are_left_alone(
    model_pool: WorkerPool,
) -> None:
    model_pool.run(other_heads, 1)


def noise(rank: int, world_size: int) -> None:
    from mesh_attention.huggingface.trainer_model import EmbeddingNoise

    embeddings = nn.Embedding(5, 4).requires_grad_(False)
    drawing = EmbeddingNoise(embeddings, 8.0, rank=1)
    ids = torch.zeros(50, 20, dtype=torch.long)
    plain = nn.functional.embedding(ids, embeddings.weight)
    assert torch.equal(embeddings(ids), plain)  # no batch yet
    drawing.length = 400
    torch.manual_seed(0)
    drawn = embeddings(ids)
    most = (drawn - plain).abs().max().item()
    assert 0.95 * 0.2 < most <= 0.2 + 1e-6  # 8 / sqrt(400 * 4)
    assert torch.equal(embeddings.eval()(ids), plain)
    drawing._rank = 0
    torch.manual_seed(0)
    assert not torch.equal(embeddings.train()(ids), drawn)
    drawing.remove()
    assert torch.equal(embeddings.train()(ids), plain)


def test_noise_has_the_size_that_the_whole_sequence_says(model_pool: WorkerPool) -> None:
    """NEFTune's alpha / sqrt(length * width), where a rank has a part of the length."""
    model_pool.run(noise, 1)
