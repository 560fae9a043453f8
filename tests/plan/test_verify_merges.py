"""Partial results that are combined wrongly, or not at all, are caught."""

from __future__ import annotations

from dataclasses import replace

from mutants import (
    Collective,
    caught,
    places,
    random_places,
)

from mesh_attention.plan.language.program import (
    Merge,
    MergeRule,
    Operation,
    ReduceScatter,
)
from mesh_attention.plan.methods.box_methods import MeshSetting, box_plan
from mesh_attention.plan.methods.parts.reduce import Combine
from mesh_attention.plan.problem.mask import Mask
from mesh_attention.plan.problem.problem import Problem


def test_a_dropped_merge_is_caught_in_a_group_of_that_rank() -> None:
    """In the operation that misses the result, or at the end in an output that lacks it."""
    for _, place in random_places(11, lambda op: isinstance(op, Merge)):
        finding = caught(place, place.put())
        members = {place.rank}
        for op in place.program.operations[place.at + 1 :]:
            if isinstance(op, Collective):
                members |= set(place.pass_.groups[op.group])
        assert finding.rank in members


def is_rescale(op: Operation) -> bool:
    return isinstance(op, Merge) and op.rule is MergeRule.RESCALE


def test_a_reduce_scatter_of_outputs_that_were_not_rescaled_is_caught() -> None:
    plan = box_plan(
        Problem(48, 2, 8, mask=Mask(causal=True)),
        6,
        MeshSetting(tile=(3, 2), chunks=(2, 1), combine=Combine.REDUCE_SCATTER),
    )
    rescales = places(plan, is_rescale)
    assert rescales
    for place in rescales:
        assert isinstance(place.op, Merge)
        copy = Merge(place.op.task, MergeRule.SUM, place.op.inputs[:1], place.op.outputs)
        finding = caught(place, place.put(copy))
        name = place.op.name.removesuffix(".rescale")
        assert finding.operation == name
        group = next(
            op.group for op in place.program.operations
            if isinstance(op, ReduceScatter) and op.name == name
        )  # fmt: skip
        assert finding.rank in place.pass_.groups[group]


def test_rescaling_to_the_local_lse_instead_of_the_global_one_is_caught() -> None:
    plan = box_plan(Problem(48, 2, 8), 6, MeshSetting(tile=(3, 2), combine=Combine.REDUCE_SCATTER))
    for place in places(plan, is_rescale):
        assert isinstance(place.op, Merge)
        out, own, _ = place.op.inputs
        finding = caught(place, place.put(replace(place.op, inputs=(out, own, own))))
        assert finding.operation == "RS-Q-0"


def test_gradients_of_k_that_are_reduced_as_gradients_of_v_are_caught() -> None:
    plan = box_plan(Problem(32, 1, 4), 4, MeshSetting(tile=(4, 1)))
    for place in places(plan, lambda op: op.name == "RS-dKV-0.copy"):
        assert isinstance(place.op, Merge)
        swap = {"grad_k": "grad_v", "grad_v": "grad_k"}
        (end,) = place.op.outputs
        wrong = replace(place.op, outputs=(replace(end, buffer=swap[end.buffer]),))
        finding = caught(place, place.put(wrong))
        assert (finding.rank, finding.operation) == (place.rank, place.op.name)


def test_adding_lses_instead_of_combining_them_is_caught() -> None:
    plan = box_plan(Problem(32, 1, 4), 4, MeshSetting(tile=(2, 2), combine=Combine.REDUCE_SCATTER))
    for place in places(plan, lambda op: isinstance(op, Merge) and op.rule is MergeRule.LSE):
        assert isinstance(place.op, Merge)
        finding = caught(place, place.put(replace(place.op, rule=MergeRule.SUM)))
        assert (finding.rank, finding.operation) == (place.rank, place.op.name)
