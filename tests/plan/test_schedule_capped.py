"""Greedy under a memory cap keeps the cap, never gets stuck, and is greedy when there is room."""

from __future__ import annotations

from random import Random

import pytest
from schedule_graphs import (
    Builder,
    backward_graph,
    check_schedule,
    chunk_memory,
    communication,
    compute,
    forward_graph,
    random_graph,
    random_memory,
    strict_makespan,
)

from mesh_attention.plan.language.program import Task
from mesh_attention.plan.language.tasks import TaskGraph
from mesh_attention.plan.methods.parts.greedy import (
    MemoryCapError,
    MemoryModel,
    greedy,
    greedy_capped,
    peak_bytes,
    smallest_cap,
)


def test_every_cap_from_the_smallest_up_is_kept() -> None:
    for seed in range(60):
        rng = Random(seed)
        graph = random_graph(rng, largest=3)
        model = random_memory(rng, graph)
        smallest = smallest_cap(graph, model)
        for cap in (smallest, smallest + 1, smallest + rng.randint(2, 20)):
            schedule = greedy_capped(graph, model, cap)
            check_schedule(graph, schedule, strict=True)
            assert peak_bytes(model, schedule.order()) <= cap


def test_one_byte_less_than_the_smallest_cap_raises_with_both_numbers() -> None:
    for seed in range(20):
        rng = Random(seed)
        graph = random_graph(rng, largest=3)
        model = random_memory(rng, graph)
        smallest = smallest_cap(graph, model)
        with pytest.raises(MemoryCapError) as caught:
            greedy_capped(graph, model, smallest - 1)
        assert caught.value.cap_bytes == smallest - 1
        assert caught.value.smallest_cap_bytes == smallest


def test_the_error_says_both_numbers_in_bytes_and_in_human_units() -> None:
    message = str(MemoryCapError(1024, 3 * 2**29))
    assert message == (
        "max_memory_bytes=1024: no schedule fits into 1.00 KiB; "
        "the smallest cap that fits is 1610612736 bytes (1.50 GiB)"
    )


def test_a_cap_that_never_binds_gives_the_greedy_schedule_itself() -> None:
    for seed in range(100):
        rng = Random(seed)
        graph = random_graph(rng)
        model = random_memory(rng, graph)
        assert greedy_capped(graph, model, sum(model.buffer_bytes.values())) == greedy(graph)


@pytest.mark.parametrize("build", [forward_graph, backward_graph])
def test_memory_is_bought_with_time(build: Builder) -> None:
    graph = build(4, 4, lambda name: 1.0, lambda q, kv: 1.0)
    model = chunk_memory(graph, q_bytes=1, kv_bytes=2)
    smallest = smallest_cap(graph, model)
    free = peak_bytes(model, greedy(graph).order())
    lean = greedy_capped(graph, model, smallest)
    assert smallest < free
    assert strict_makespan(graph, lean) > strict_makespan(graph, greedy(graph))
    assert greedy_capped(graph, model, smallest) == lean


def test_gathers_keep_index_order_under_a_cap() -> None:
    for seed in range(40):
        rng = Random(seed)
        graph = random_graph(rng, largest=3)
        model = random_memory(rng, graph)
        order = greedy_capped(graph, model, smallest_cap(graph, model)).order()
        for kind in ("AG-KV", "AG-Q"):
            issued = [str(task) for task in order if task.kind == kind]
            assert issued == [f"{kind}-{i}" for i in range(len(issued))]


def test_a_reduction_without_needs_never_blocks_one_that_frees_memory() -> None:
    # RS-Q-0 sends a large empty result and does not fit until RS-Q-1 has freed its chunk.
    graph = TaskGraph(
        (
            communication("AG-Q-1", 1.0),
            communication("RS-Q-0", 1.0),
            communication("RS-Q-1", 1.0, "C-1-0"),
        ),
        (compute("C-1-0", 1.0, "AG-Q-1"),),
    )
    model = MemoryModel(
        {"q": 6, "o": 2, "empty": 8},
        {
            Task("AG-Q", (1,)): (("q",),),
            Task("RS-Q", (0,)): (("empty",),),
            Task("C", (1, 0)): (("q", "o"),),
            Task("RS-Q", (1,)): (("o",),),
        },
    )
    assert smallest_cap(graph, model) == 8
    schedule = greedy_capped(graph, model, 8)
    assert peak_bytes(model, schedule.order()) == 8
    check_schedule(graph, schedule, strict=True)
