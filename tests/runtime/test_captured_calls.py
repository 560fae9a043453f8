"""Calls as CUDA graphs, with stand-ins for CUDA: captured once, replayed on copies of inputs."""

from __future__ import annotations

from contextlib import nullcontext
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from mesh_attention import MeshAttentionError, Problem, make_plan
from mesh_attention.plan.language.plan import Direction
from mesh_attention.runtime.device import Workspace
from mesh_attention.runtime.execute.executor import CallShape
from mesh_attention.runtime.session import prepared_call
from mesh_attention.runtime.session.call_options import CallOptions
from mesh_attention.runtime.session.prepared_call import CapturedCall, PreparedCall
from mesh_attention.runtime.session.rank_plan import RankPlan
from mesh_attention.runtime.session.transports import Transports
from mesh_attention.runtime.transport import shared_memory

CPU = torch.device("cpu")
GROUPS: Any = SimpleNamespace(
    ranks=(0, 1), global_rank_of_self=0, name="g", global_rank=lambda plan, rank: rank
)


def prepared() -> PreparedCall:
    own = RankPlan.on(make_plan(Problem(8, 1, 4), 1, method="mesh"), 0, 1)
    shape = CallShape(1, torch.float32, CPU)
    return PreparedCall(Transports(GROUPS), own, CallOptions(cuda_graph=True), shape)


def test_a_graph_of_tensors_on_the_cpu_is_refused() -> None:
    with pytest.raises(MeshAttentionError, match="cuda_graph=True needs CUDA tensors, not cpu"):
        prepared().reserve()


def test_a_pass_is_captured_when_it_first_runs_and_replayed_from_then_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    captured = []

    class Captured:
        def __init__(self, *arguments: object) -> None:
            captured.append(self)
            self.replayed = 0

        def __call__(self, inputs: object) -> int:
            self.replayed += 1
            return self.replayed

    monkeypatch.setattr(prepared_call, "CapturedCall", Captured)
    call: Any = prepared()
    call.transport.stream = object()
    executor = SimpleNamespace(workspace_bytes=8)
    assert [call._replay(Direction.FORWARD, executor, {}) for _ in range(3)] == [1, 2, 3]
    assert call._replay(Direction.BACKWARD, executor, {}) == 1
    assert len(captured) == 2


def test_a_replay_reads_what_it_is_given_now_and_gives_results_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    result = torch.zeros(2)

    def double(inputs: Any) -> dict[str, Tensor]:
        static.update(inputs)
        torch.mul(inputs["q"], 2.0, out=result)
        return {"out": result}

    static: dict[str, Tensor] = {}
    graph = SimpleNamespace(replay=lambda: double(dict(static)))
    stream: Any = SimpleNamespace(device=CPU, wait_stream=lambda other: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graph)
    monkeypatch.setattr(torch.cuda, "graph", lambda *_, **__: nullcontext())
    monkeypatch.setattr(prepared_call, "current_stream", lambda device: stream)
    call = CapturedCall(double, {"q": torch.ones(2)}, Workspace().take(8, CPU), stream)
    first = call({"q": torch.full((2,), 3.0)})["out"]
    second = call({"q": torch.full((2,), 4.0)})["out"]
    assert (first.tolist(), second.tolist()) == ([6.0, 6.0], [8.0, 8.0])


@pytest.mark.parametrize("abandon", [True, False])
def test_shared_memory_is_released_with_the_transports_or_left_where_signals_may_never_come(
    monkeypatch: pytest.MonkeyPatch, abandon: bool
) -> None:
    store = HashStore()
    monkeypatch.setattr(shared_memory, "default_store", lambda: store)
    messages: list[str] = []
    transports = Transports(GROUPS)
    own = RankPlan.on(make_plan(Problem(8, 1, 4), 2, method="mesh"), 0, 2)
    memory = transports.memory(own, timedelta(seconds=5))
    assert transports.memory(own, timedelta(seconds=5)) is memory
    block: Any = SimpleNamespace(
        release=lambda: messages.append("release"), abandon=lambda: messages.append("abandon")
    )
    memory.block = block
    transports.close(abandon=abandon)
    assert messages == ["abandon" if abandon else "release"]
    assert transports.memory(own, timedelta(seconds=5)) is not memory
