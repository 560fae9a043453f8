"""A call that ends on one rank by anything at all, before or after ranks have compared it.

The others are told, and what comes next on the group is refused: the rank is one call behind them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from mesh_attention import ContextParallel, mesh_attention
from mesh_attention.runtime.agreement import identity
from mesh_attention.runtime.session.session import User
from support.pool import WorkerPool

RANKS, ODD = 2, 1


class NotToBeTold:
    """An argument that cannot even be named."""

    def __repr__(self) -> str:
        raise LookupError("no name")


class NotToBeAsked(Tensor):
    @classmethod
    def __torch_function__(cls, *_: Any, **__: Any) -> Any:
        raise LookupError("no answer")


def interrupt(*_: Any, **__: Any) -> Any:
    raise KeyboardInterrupt("enough")


def interrupted(place: str) -> Any:
    return mock.patch(f"mesh_attention.{place}", interrupt)


def after_the_comparison(kind: type[BaseException] = KeyboardInterrupt) -> Any:
    """Others go on, and send."""
    begin = User.begin

    def begin_and_end(*inputs: Any, **named: Any) -> None:
        begin(*inputs, **named)
        raise kind("enough")

    return mock.patch.object(User, "begin", begin_and_end)


def with_a_full_stack(call: Callable[[], Any], left: int) -> Any:
    """With this many frames left, or fewer."""

    def deep(depth: int) -> Any:
        return call() if depth == 0 else deep(depth - 1)

    frame, used = sys._getframe(), 0
    while frame is not None:
        frame, used = frame.f_back, used + 1  # type: ignore[assignment]
    return deep(sys.getrecursionlimit() - used - left)


class Calls:
    """On a group of their own; every kind was made before."""

    def __init__(self) -> None:
        self.group = dist.new_group(timeout=timedelta(seconds=20))
        sizes: dict[str, Any] = {"seq_len": 8, "num_heads": 2, "head_dim": 4}
        self.cp = ContextParallel(self.group, **sizes, causal=False, method="ring")
        self.q = torch.ones(1, 4, 2, 4)
        self.leaf = torch.ones(1, 4, 2, 4).requires_grad_()
        for call in (self.attend, self.function, self.unshard, self.loss, self.backward(self.leaf)):
            call()

    def attend(self, q: Any = None, **inputs: Any) -> Any:
        return self.cp.attention(self.q if q is None else q, self.q, self.q, **inputs)

    def function(self, *more: Any) -> Any:
        return mesh_attention(self.q, self.q, self.q, *more, group=self.group, causal=False)

    def unshard(self, **inputs: Any) -> Any:
        return self.cp.unshard(self.q, 1, **inputs)

    def loss(self) -> Any:
        targets = torch.zeros(1, 4, dtype=torch.long)
        return self.cp.cross_entropy(torch.zeros(1, 4, 3), targets, reduce="sum")

    def backward(self, leaf: Tensor) -> Callable[[], Any]:
        out = self.cp.attention(leaf, self.q, self.q)
        assert isinstance(out, Tensor)
        return lambda: torch.autograd.grad(out, leaf, torch.ones_like(out))

    def block(self, *, odd: bool) -> Any:
        q = self.q.transpose(1, 2)
        with self.cp.context_parallel():
            return scaled_dot_product_attention(q.as_subclass(NotToBeAsked) if odd else q, q, q)


Case = Callable[[Calls, bool], Any]


def inside(patch: Any, call: Callable[[], Any], odd: bool) -> Any:
    if not odd:
        return call()
    with patch:
        return call()


CASES: dict[str, tuple[str, Case]] = {
    "keyword": ("TypeError", lambda c, odd: c.unshard(**{"nonsense": 1} if odd else {})),
    "label": ("LookupError", lambda c, odd: c.attend(label=NotToBeTold() if odd else None)),
    "documents": (
        "LookupError",
        lambda c, odd: c.unshard(documents=NotToBeTold() if odd else None),
    ),
    "tensor": (
        "LookupError",
        lambda c, odd: c.attend(c.q.as_subclass(NotToBeAsked) if odd else None),
    ),
    "block": ("LookupError", lambda c, odd: c.block(odd=odd)),
    "function": ("TypeError", lambda c, odd: c.function(*[1] * odd)),
    "interrupted": (
        "KeyboardInterrupt",
        lambda c, odd: inside(interrupted("request.attend._key"), c.attend, odd),
    ),
    "interrupted function": (
        "KeyboardInterrupt",
        lambda c, odd: inside(interrupted("api.functional.fault_of_unsupported"), c.function, odd),
    ),
    "interrupted loss": (
        "KeyboardInterrupt",
        lambda c, odd: inside(interrupted("train.losses.own_copies"), c.loss, odd),
    ),
    "attention after": (
        "KeyboardInterrupt",
        lambda c, odd: inside(after_the_comparison(), c.attend, odd),
    ),
    "loss after": (
        "LookupError",
        lambda c, odd: inside(after_the_comparison(LookupError), c.loss, odd),
    ),
    "unshard after": (
        "LookupError",
        lambda c, odd: inside(after_the_comparison(LookupError), c.unshard, odd),
    ),
    "backward after": (
        "KeyboardInterrupt",
        lambda c, odd: inside(after_the_comparison(), c.backward(c.leaf), odd),
    ),
    "stack": (
        "RecursionError",
        lambda c, odd: with_a_full_stack(c.attend, 12) if odd else c.attend(),
    ),
}


def said(call: Callable[[], Any]) -> str:
    try:
        call()
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def made(case: Case, *, odd: bool) -> tuple[str, str]:
    """What a case and the next call came to."""
    calls = Calls()
    return said(lambda: case(calls, odd)), said(calls.attend)


def end_calls(rank: int, world_size: int) -> dict[str, tuple[str, str]]:
    with mock.patch.object(identity, "_TURN", timedelta(seconds=0.05)):
        results = {name: made(case, odd=rank == ODD) for name, (_, case) in CASES.items()}
        return results | {"alike": made(lambda c, _: c.unshard(nonsense=1), odd=False)}


def test_whatever_ends_a_call_on_one_rank_is_told_and_what_follows_is_refused(
    pool: WorkerPool,
) -> None:
    results = pool.run(end_calls, RANKS)
    for rank, result in enumerate(results):
        for name, (kind, _) in CASES.items():
            first, second = result[name]
            if rank == ODD:
                assert first.startswith(f"{kind}: "), (name, first)
            else:
                assert first.startswith(("DisagreementError: ", "CommunicationError: ")), name
                assert f"rank {ODD}" in first, (name, first)
                assert kind in first, (name, first)
            assert "everything on this group is refused" in second, (name, second)
        assert result["alike"][0].startswith("TypeError: ")
        assert result["alike"][1] == "nothing"
