"""Mistakes in the arguments of the object are refused by name, on all ranks, before data moves."""

from __future__ import annotations

import copy
import pickle
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from mesh_attention import Mask, MeshAttentionError, mesh_attention
from mesh_attention.plan.methods.question import Question
from mesh_attention.request.operators import attention_op
from mesh_attention.runtime.agreement import handshake
from support.cases import Case
from support.gloo_case import context
from support.pool import WorkerPool
from support.raised import Raised, all_raised, raised_by

RANKS = 4
CASE = Case(RANKS, 40, 40, mask=Mask(causal=True), dtype=torch.float32, batch=2)

WRONG_ARGUMENTS = {
    "tile": ({"tile": (3, 2)}, "tile 3x2 has 6 cells but there are 4 ranks; tiles that fit:"),
    "tile-text": ({"tile": "two"}, "tile='two': give two numbers"),
    "unknown": ({"tyle": (2, 2)}, "no method has an option 'tyle'; did you mean"),
    "softcap": ({"softcap": -1.0}, "softcap=-1.0: must be finite and above 0"),
    "softcap, no number": ({"softcap": False}, "softcap=False: must be a number"),
    "alibi": ({"alibi_slopes": 1}, "alibi_slopes=1: a bias by distance"),
    "dropout": ({"dropout_p": 0.1}, "dropout_p=0.1: dropout of attention weights"),
    "method": ({"method": "telepathy"}, "unknown method 'telepathy'"),
    "layout": ({"layout": "diagonal"}, "layout='diagonal' is unknown; known: contiguous"),
    "combine": ({"combine": "hope"}, "combine='hope' is unknown"),
    "chunks": ({"chunks": (5, 5)}, "chunks=5x5"),
    "heads": ({"num_kv_heads": 3}, "num_heads=4 is not a multiple of num_kv_heads=3"),
    "length": ({"seq_len": 0}, "seq_len=0: must be a whole number of at least 1"),
    "keys": ({"kv_seq_len": 0}, "kv_seq_len=0: must be a whole number of at least 1"),
    "window-twice": ({"mask": Mask(causal=True), "window_size": (4, 0)}, "not both"),
    "mask-and-causal": ({"mask": Mask(causal=True), "causal": False}, "causal=False contradicts"),
    "causal-and-mask": ({"mask": Mask(window=(3, 3)), "causal": True}, "contradicts"),
    "documents": ({"mask": Mask(causal=True, documents=(0, 39))}, "documents end at 39"),
    "alpha": ({"alpha": 2}, "nodes of 8 ranks do not form 2-wide patches"),
    "graph": ({"cuda_graph": True}, "cuda_graph=True needs a group over nccl"),
    "graph-text": ({"cuda_graph": "yes"}, "cuda_graph='yes': must be True or False"),
    "kernel": ({"kernel": np.array(["cudnn", "blockwise"])}, "no kernel is named array(["),
    "transport": ({"transport": np.array([1, 2])}, "transport=array([1, 2]) is unknown"),
    "method-array": ({"method": np.array(["mesh", "ring"])}, "unknown method array(["),
    "timeout": ({"timeout": timedelta(0)}, "timeout=datetime.timedelta(0): must be above 0"),
    "memory": ({"max_memory_bytes": 10}, "10"),
}


def construct(
    rank: int, world_size: int, mistakes: list[dict[str, Any]], by: list[int], usual: dict[str, Any]
) -> list[Raised]:
    """What each mistake raises, one after the other on the same group."""
    made = mistakes if rank in by else [usual] * len(mistakes)
    return [
        raised_by(partial(context, CASE, **({"method": None} | changes)))  # by default: chosen
        for changes in made
    ]


@pytest.mark.parametrize("by", [[0, 1, 2, 3], [1]], ids=["all", "one"])
def test_wrong_arguments_are_refused_by_name_on_all_ranks(pool: WorkerPool, by: list[int]) -> None:
    """Need 6."""
    mistakes = [changes for changes, _ in WRONG_ARGUMENTS.values()]
    by_mistake = zip(*pool.run(construct, RANKS, mistakes, by, {}), strict=True)
    for (name, (_, reason)), raised in zip(WRONG_ARGUMENTS.items(), by_mistake, strict=True):
        all_raised(list(raised))
        for rank, refusal in enumerate(raised):
            assert reason in refusal.error, name
            assert rank in by or f"rank {by[0]}" in refusal.error, name


OTHER_ARGUMENTS = {
    "causal": {"causal": False, "mask": None},
    "length": {"seq_len": 44, "kv_seq_len": 44},
    "tile": {"tile": (4, 1)},
    "dtype": {"dtype": torch.bfloat16},
    "scale": {"softmax_scale": 0.5},
    "chunks": {"chunks": (2, 2)},
}


def test_an_object_made_differently_on_one_rank_is_refused_and_the_rank_named(
    pool: WorkerPool,
) -> None:
    odd = 3
    mistakes = list(OTHER_ARGUMENTS.values())
    by_mistake = zip(*pool.run(construct, RANKS, mistakes, [odd], {"tile": (2, 2)}), strict=True)
    for name, raised in zip(OTHER_ARGUMENTS, by_mistake, strict=True):
        all_raised(list(raised))
        for rank, refusal in enumerate(raised):
            options = "options must be the same on all ranks" in refusal.error
            disagrees = f"rank {odd} of the group [0, 1, 2, 3] disagrees" in refusal.error
            assert options or disagrees, name
            assert rank == odd or f"rank {odd}" in refusal.error, name


def come_late(rank: int, world_size: int, odd: int, late: list[int]) -> Raised:
    """One rank finds its own mistake; some ranks come when others have lost patience."""
    handshake._PATIENCE_SECONDS = 0.3
    try:
        if rank in late:
            time.sleep(1.0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it says, rightly, for whom it is waiting
            return raised_by(
                lambda: context(CASE, method=None, tile=(3, 3) if rank == odd else None)
            )
    finally:
        handshake._PATIENCE_SECONDS = 10.0


@pytest.mark.parametrize(
    ("odd", "late"), [(0, [1, 2, 3]), (0, [2]), (2, [0]), (2, [0, 1]), (1, [1])]
)
def test_ranks_that_come_late_are_told_of_the_mistake(
    pool: WorkerPool, odd: int, late: list[int]
) -> None:
    raised = pool.run(come_late, RANKS, odd, late, seconds=20.0)
    all_raised(raised)
    assert all("tiles that fit" in failure.error for failure in raised)
    assert all(f"rank {odd}" in failure.error for rank, failure in enumerate(raised) if rank != odd)


def masks_that_cannot_be(rank: int, world_size: int) -> list[Raised]:
    return [
        raised_by(lambda: context(CASE, mask=Mask(causal=True, prefix=3, window=(4, 0)))),
        raised_by(lambda: context(CASE, mask=Mask(prefix=3))),
        raised_by(lambda: context(CASE, mask=Mask(documents=(3, 40)))),
    ]


def test_masks_that_cannot_be_are_refused(pool: WorkerPool) -> None:
    for raised in pool.run(masks_that_cannot_be, RANKS):
        all_raised(raised)
        assert "'prefix' and 'window' exclude each other" in raised[0].error


FUNCTION_MISTAKES: list[dict[str, Any]] = [
    {"dropout_p": 0.1}, {"softcap": 20.0}, {"alibi_slopes": 1}, {"causal": False},
    {"seq_len": 0}, {"kv_seq_len": 0}, {"seq_len": "24"},
]  # fmt: skip


def function_wrongly(rank: int, world_size: int, odd: int) -> list[Raised]:
    inputs = [torch.randn(1, 8, 2, 8) for _ in range(3)]
    made = FUNCTION_MISTAKES if rank == odd else [{}] * len(FUNCTION_MISTAKES)
    return [
        raised_by(partial(mesh_attention, *inputs, **({"causal": True} | changes)))
        for changes in made
    ]


def test_the_function_refuses_what_one_rank_asks_for_on_all(pool: WorkerPool) -> None:
    by_mistake = zip(*pool.run(function_wrongly, 3, 1), strict=True)
    for changes, raised in zip(FUNCTION_MISTAKES, by_mistake, strict=True):
        all_raised(list(raised))
        for rank, refusal in enumerate(raised):
            assert rank == 1 or "rank 1" in refusal.error, changes
            assert next(iter(changes)) in refusal.error or "plan is" in refusal.error, changes


def unknown_kernel(rank: int, world_size: int) -> Raised:
    return raised_by(lambda: context(CASE, kernel="abacus"))


def test_a_kernel_of_an_unknown_name_is_refused_on_all(pool: WorkerPool) -> None:
    raised = pool.run(unknown_kernel, RANKS)
    all_raised(raised)
    assert all("no kernel is named 'abacus'" in failure.error for failure in raised)


def wrong_devices(rank: int, world_size: int) -> list[Raised]:
    with context(CASE) as cp:
        assert torch.equal(cp.positions(device="cpu"), cp.positions())
        places: list[Any] = [5.5, "here", True]
        return [raised_by(partial(cp.positions, device=place), cp) for place in places]


def test_a_device_that_is_none_is_refused_by_name(pool: WorkerPool) -> None:
    for raised in pool.run(wrong_devices, 1):
        all_raised(raised)
        said = [failure.error.partition(":")[0] for failure in raised]
        assert said == ["device=5.5", "device='here'", "device=True"]


def wrong_groups(rank: int, world_size: int) -> list[Raised]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    others: list[Any] = [dist.new_group([0, 1]), DeviceMesh("cpu", [1, 0])]
    nonsense: list[Any] = ["world", 2]
    raised = [raised_by(lambda: context(CASE, mesh))]
    raised += [raised_by(partial(context, CASE, other)) for other in nonsense]
    if rank > 1:
        raised += [raised_by(partial(context, CASE, other)) for other in others]
    return raised


def test_meshes_of_two_dimensions_and_foreign_groups_are_refused(pool: WorkerPool) -> None:
    for raised in pool.run(wrong_groups, RANKS):
        all_raised(raised)
        assert "2 dimensions ('dp', 'cp'); pass one of them, as in mesh['cp']" in raised[0].error
        assert "the group is 'world'; give a torch.distributed.ProcessGroup" in raised[1].error
        assert "the group is 2; give a torch.distributed.ProcessGroup" in raised[2].error
        assert all("this rank is not a member of the" in failure.error for failure in raised[3:])


def test_without_a_process_group_the_error_says_what_to_call() -> None:
    assert not dist.is_initialized()
    with pytest.raises(MeshAttentionError, match="init_process_group first"):
        context(CASE)
    q, k, v, _ = CASE.tensors()
    with pytest.raises(MeshAttentionError, match="init_process_group first"):
        mesh_attention(q, k, v, causal=True)


def small_mistakes(rank: int, world_size: int) -> dict[str, str]:
    """What two ranks say, the second of which has the meta device by default."""
    with torch.device("meta" if rank else "cpu"):
        cp = context(Case(world_size, 7, 7, heads=(4, 4), mask=Mask(causal=True)))
        q = cp.shard(torch.rand(1, 7, 4, 8, device="cpu"), np.int64(1))  # type: ignore[arg-type]
        q.requires_grad_()
        documents = cp.documents([0, 3, 7])
        out = cp.attention(q, q, q, label=np.int64(3))  # type: ignore[arg-type]
        assert isinstance(out, torch.Tensor)
        out.sum().backward()  # type: ignore[no-untyped-call]
        assert cp.unshard(out.detach(), 1).device.type == cp.positions().device.type == "cpu"

    def changed_in_place() -> None:
        out = cp.attention(q, q, q)
        assert isinstance(out, torch.Tensor)
        out += 1
        out.sum().backward()  # type: ignore[no-untyped-call]

    def of_inference_mode() -> None:
        with torch.inference_mode():
            k = torch.rand_like(q, device="cpu")
        cp.attention(q, k, q)

    def planned_on_one_rank() -> None:
        with pytest.MonkeyPatch.context() as patch:
            if rank:
                patch.setattr(Question, "plan", lambda self: 1 / 0)
            context(Case(world_size, 9, 9, mask=Mask()))

    assert copy.deepcopy([cp])[0] is cp  # as in a copy of a model that holds it
    called: dict[str, Callable[[], object]] = {
        "copy": lambda: copy.copy(cp),
        "pickle": lambda: pickle.dumps(cp),
        "documents": lambda: copy.deepcopy(documents),
        "called": lambda: cp(q, q, q),
        "batch": lambda: cp.shard_batch({"input_ids": q}),  # type: ignore[arg-type]
        "scale": lambda: cp.attention(q, q, q, softmax_scale=0.5),  # type: ignore[arg-type]
        "mask": lambda: cp.attention(q, q, q, attn_mask=None),  # type: ignore[arg-type]
        "operator": lambda: attention_op(
            *(q, q, q, None, None, None, "mine", None), *(True, True, False), *[None] * 5
        ),
        "inference": of_inference_mode,
        "batched": lambda: torch.autograd.grad(
            cp.attention(q, q, q),
            q,
            torch.ones(2, *q.shape),
            is_grads_batched=True,
        ),
        "tiled": lambda: cp.tiled(lambda x: cp.attention(x, x, x), tokens=2)(q),  # type: ignore[arg-type, return-value]
        "planned": planned_on_one_rank,
        "in place": changed_in_place,
    }
    said = {}
    for name, call in called.items():
        begun = time.monotonic()
        with pytest.raises((ValueError, RuntimeError, ZeroDivisionError)) as raised:
            call()
        said[name] = f"{raised.value}"
        assert time.monotonic() - begun < 10
    return said


def test_small_mistakes_are_told_with_the_way_out(pool: WorkerPool) -> None:
    said = pool.run(small_mistakes, 2)
    for each in said:
        for name in ("copy", "pickle"):
            assert "cannot be copied or pickled: use the same object" in each[name]
        assert "their `pack` travels" in each["documents"]
        assert "call cp.attention(q, k, v)" in each["called"]
        assert "shard_batch(**batch)" in each["batch"]
        assert "it goes into ContextParallel(..., softmax_scale=...)" in each["scale"]
        assert "it goes into ContextParallel(..., mask=Mask(...))" in each["mask"]
        assert "'mine' is the name of no object" in each["operator"]
        assert "k was made in inference mode, and another input" in each["inference"]
        assert "is_grads_batched=True is not supported" in each["batched"]
        assert "tiled: the block calls attention" in each["tiled"]
        assert "modified by an inplace operation" in each["in place"]  # not that it is a view
    assert said[0]["planned"] == "rank 1: ZeroDivisionError: division by zero"
    assert said[1]["planned"] == "division by zero"
