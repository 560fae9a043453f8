"""Padding may hold anything: NaN there reaches nothing, whatever the layout and the kernel."""

from __future__ import annotations

import pytest
import torch

from mesh_attention import Mask
from mesh_attention.plan.language.plan import Direction, Plan
from mesh_attention.runtime.execute.executor import CallShape
from mesh_attention.runtime.session.call_options import CallOptions
from mesh_attention.testing import _Run, run_local
from support.cases import Case

NAMES = ("out", "lse", "grad_q", "grad_k", "grad_v")


class NanInPadding(_Run):
    """Shards whose padded slots hold NaN."""

    def shard(self, name: str, whole: torch.Tensor, rank: int) -> torch.Tensor:
        results = super().shard(name, whole, rank).clone()
        layout = self.layout(name)
        padded = [token is None for token in layout.tokens(rank)]
        results[torch.tensor(padded)] = torch.nan
        return results


def results(run: _Run, tensors: tuple[torch.Tensor, ...], plan: Plan) -> dict[str, torch.Tensor]:
    named = dict(zip(("q", "k", "v"), tensors[:3], strict=True))
    inputs = [
        {name: run.shard(name, x, rank) for name, x in named.items()}
        for rank in range(plan.num_ranks)
    ]
    forward = run.all_ranks(Direction.FORWARD, inputs)
    for rank, local in enumerate(inputs):
        local |= forward[rank] | {"grad_out": run.shard("grad_out", tensors[3], rank)}
    backward = run.all_ranks(Direction.BACKWARD, inputs)
    both = [a | b for a, b in zip(forward, backward, strict=True)]
    return {name: run.join(name, both) for name in NAMES}


@pytest.mark.parametrize("kernel", [None, "blockwise", "reference"])
@pytest.mark.parametrize(
    "options",
    [
        {"layout": "striped"},
        {"layout": "striped", "stripe_block": 4},
        {"layout": "zigzag"},
        {"layout": "contiguous", "method": "ring"},
        {"layout": "striped", "method": "ulysses"},
    ],
    ids=lambda x: "-".join(map(str, x.values())),
)
def test_nan_in_padding_reaches_nothing(options: dict[str, object], kernel: str | None) -> None:
    case = Case(
        4, 45, 45, heads=(4, 4), mask=Mask(causal=True), dtype=torch.float32, options=options
    )
    plan, tensors = case.plan(), case.tensors()
    shape = CallShape(tensors[0].shape[0], torch.float32, torch.device("cpu"))
    run = NanInPadding(plan, shape, CallOptions(kernel=kernel), True)
    result = results(run, tensors, plan)
    truth = run_local(plan, *tensors, kernel="reference")
    for name in NAMES:
        wanted = getattr(truth, name)
        seen = result[name].squeeze(-1).transpose(1, 2) if name == "lse" else result[name]
        torch.testing.assert_close(seen, wanted, msg=f"{name} {kernel}")
