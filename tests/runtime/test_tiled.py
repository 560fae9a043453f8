"""`cp.tiled`: the numbers of the whole block, with the memory of one tile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call
from torch.nn.functional import silu
from torch.utils.checkpoint import checkpoint

from mesh_attention import MeshAttentionError
from mesh_attention.train.keep_attention import KeepAttention
from mesh_attention.train.tiled import Tiled

WIDTH, INNER, TOKENS = 24, 40, 100


class SwiGLU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.gate, self.up = (nn.Linear(WIDTH, INNER, bias=False) for _ in range(2))
        self.drop, self.down = nn.Dropout(0.0), nn.Linear(INNER, WIDTH)
        self.most_rows = 0

    def forward(self, x: Tensor) -> Tensor:
        self.most_rows = max(self.most_rows, x.shape[-2])
        x = self.norm(x)
        out: Tensor = self.down(self.drop(silu(self.gate(x)) * self.up(x)))
        return out


def block(dtype: torch.dtype = torch.float64) -> tuple[SwiGLU, Tensor, Tensor]:
    torch.manual_seed(0)
    x, grad = (torch.randn(2, TOKENS, WIDTH, dtype=dtype) for _ in range(2))
    return SwiGLU().to(dtype), x.requires_grad_(), grad


def results(
    run: Callable[[Tensor], Tensor], mlp: nn.Module, x: Tensor, grad: Tensor
) -> list[Tensor]:
    out = run(x)
    leaves = [leaf for leaf in (x, *mlp.parameters()) if leaf.requires_grad]
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


@pytest.mark.parametrize("frozen", [(), ("gate.weight", "down.weight"), None])
def test_tiles_have_the_numbers_of_the_whole_and_bits_of_their_own(
    frozen: tuple[str, ...] | None,
) -> None:
    """Of float64 also the bits of outputs and of the gradient of the input; of parameters, which
    are sums, not. `frozen`: as in LoRA; None: the input has no gradient."""
    mlp, x, grad = block()
    x.requires_grad_(frozen is not None)
    for name in frozen or ():
        mlp.get_parameter(name).requires_grad_(False)
    wanted = results(mlp, mlp, x, grad)
    for tokens in (7, 50, 1000):
        mlp.most_rows = 0
        tiled = Tiled(mlp, tokens)
        result = results(tiled, mlp, x, grad)
        assert mlp.most_rows == min(tokens, TOKENS)
        same_bits = 2 if x.requires_grad else 1
        for place, (a, b) in enumerate(zip(wanted, result, strict=True)):
            assert torch.equal(a, b) if place < same_bits else (a - b).abs().max() < 1e-12

        def checkpointed(x: Tensor, tiled: Tiled = tiled) -> Tensor:
            out: Tensor = checkpoint(tiled, x, use_reentrant=False)
            return out

        again = results(checkpointed, mlp, x, grad)
        assert all(torch.equal(a, b) for a, b in zip(result, again, strict=True))


def test_nothing_is_saved_but_the_input_and_the_parameters() -> None:
    mlp, x, _ = block()
    saved: list[Tensor] = []

    def pack(y: Tensor) -> Tensor:
        saved.append(y)
        return y

    with saved_tensors_hooks(pack, lambda y: y):
        Tiled(mlp, 10)(x)
    assert {y.data_ptr() for y in saved} == {y.data_ptr() for y in (x, *mlp.parameters())}


@pytest.mark.parametrize("autocast", [False, True])
def test_random_numbers_and_autocast_are_those_of_the_forward_pass(autocast: bool) -> None:
    """Also where the backward pass comes in another autocast, or in the same."""
    mlp, x, grad = block(torch.float32)
    mlp.drop.p = 0.5

    def by_hand(y: Tensor) -> Tensor:
        return torch.cat([mlp(tile) for tile in torch.split(y, 30, -2)], -2)

    results, states = [], []
    for run in (by_hand, Tiled(mlp, 30), Tiled(mlp.forward, 30)):
        torch.manual_seed(1)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = run(x)
            grads = torch.autograd.grad(out, [x, *mlp.parameters()], grad.to(out.dtype))
        results.append([out.detach(), *grads])
        states.append(torch.get_rng_state())
    for others, state in zip(results[1:], states[1:], strict=True):
        assert torch.equal(state, states[0])
        assert all(torch.equal(a, b) for a, b in zip(results[0][:2], others[:2], strict=True))
        for a, b in zip(results[0][2:], others[2:], strict=True):
            # By hand autocast sums gradients of parameters in bfloat16.
            assert (a - b).norm() <= (1e-2 if autocast else 1e-6) * a.norm()


def test_gradients_of_short_numbers_are_summed_in_float32() -> None:
    mlp, x, grad = block()
    wanted = results(mlp, mlp, x, grad)
    short, y, short_grad = mlp.to(torch.bfloat16), x.detach().bfloat16(), grad.bfloat16()
    once, tiled = (
        results(run, short, y.requires_grad_(), short_grad) for run in (short, Tiled(short, 1))
    )
    for a, b, truth in zip(once, tiled, wanted, strict=True):
        far, farther = ((z - truth).norm() / truth.norm() for z in (a, b))
        assert farther < 1.5 * far  # several times as far if sums were short too


def refuse(run: Callable[[], object], words: str) -> None:
    with pytest.raises(MeshAttentionError, match=words):
        run()


def test_what_mixes_tokens_or_would_lose_gradients_is_refused_by_name() -> None:
    mlp, x, grad = block()
    mixing: dict[str, nn.Module] = {
        "Conv1d": nn.Conv1d(2, 2, 3),
        "LSTM": nn.LSTM(2, 2),
        "MultiheadAttention": nn.MultiheadAttention(2, 1),
    }
    for name, module in mixing.items():
        refuse(lambda: Tiled(nn.Sequential(nn.ReLU(), module), 4), f"1 is {name}")  # noqa: B023
    refuse(lambda: Tiled(mlp, 0), "tokens")
    refuse(lambda: Tiled(lambda y: mlp(y), 4)(x), "the function uses parameters")
    refuse(lambda: Tiled(torch.sum, 4)(x), "it must give one tensor with as many tokens")
    out = Tiled(mlp, 4)(x)
    refuse(lambda: torch.autograd.grad(out, x, grad, create_graph=True), "second derivatives")

    class Swapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = mlp

        def forward(self, y: Tensor) -> Tensor:
            return Tiled(self.mlp, 4)(y)

    others: Any = {n: p.detach().clone().requires_grad_() for n, p in Swapped().named_parameters()}
    swapped = functional_call(Swapped(), others, (x,))
    refuse(lambda: torch.autograd.grad(swapped, x, grad), "whose gradient would be lost")
    assert torch.equal(Tiled(torch.relu, 4)(x), torch.relu(x))


def test_what_one_graph_changed_in_place_is_told_to_its_own_backward_pass_alone() -> None:
    """Of tensors that wait in the host's memory: the next block makes them leave the device."""
    keep, linear = KeepAttention(offload=True), torch.nn.Linear(4, 4)
    first, second = (torch.randn(3, 4, requires_grad=True) * 1 for _ in range(2))
    out = checkpoint(linear, first, use_reentrant=False, context_fn=keep)
    with torch.no_grad():
        first.div_(2)
    checkpoint(linear, second, use_reentrant=False, context_fn=keep).sum().backward()
    with pytest.raises(MeshAttentionError, match="changed in place"):
        out.sum().backward()
