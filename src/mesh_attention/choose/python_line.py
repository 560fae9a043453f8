"""The line of Python that makes what a search chose, to paste."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from mesh_attention.choose.auto import PlanChoice
from mesh_attention.choose.plan_file import short_digest
from mesh_attention.errors import PlanError
from mesh_attention.plan.methods.question import ask
from mesh_attention.plan.problem.mask import Mask
from mesh_attention.plan.problem.problem import Problem

PLAN_FILE = "plan.json"


def python_line(choice: PlanChoice, file: Path | None = None) -> str:
    """The options themselves, where they make the plan that was chosen; otherwise the file of the
    plan, which `plan_file.py` writes. `file`: where it is written already."""
    options = one_setting(choice)
    if options is None:
        line = f"cp = ContextParallel(group, plan={str(file or PLAN_FILE)!r})"
        return line if file else f"{line}  # advise --output {PLAN_FILE} writes it"
    how = f'method="{choice.question.method}"{_arguments(options)}'
    return f"cp = ContextParallel(group, {_sizes(choice.asked.problem)}, {how})"


def one_setting(choice: PlanChoice) -> dict[str, Any] | None:
    """Options of one method that make the chosen plan without the cluster, whose costs may decide
    on an order of tasks; None where there are none."""
    question, passes = choice.question, [*choice.chosen.values()]
    options = {**choice.asked.options, **choice.place, **passes[0].options}
    for name, value in passes[-1].options.items():
        if options.get(name) != value:
            options[f"backward_{name}"] = value
    options["ranks_per_node"] = choice.asked.cluster.node.ranks
    how: dict[str, Any] = {"method": question.method, "directions": tuple(choice.chosen)}
    try:
        other = ask(question.problem, question.num_ranks, **how, **options)
        same = short_digest(other.plan()) == short_digest(choice.plan())
    except PlanError:
        return None
    return options if same else None


def _sizes(problem: Problem) -> str:
    sizes = f"seq_len={problem.q_tokens}, num_heads={problem.num_heads}, "
    if problem.kv_heads != problem.num_heads:
        sizes += f"num_kv_heads={problem.kv_heads}, "
    sizes += f"head_dim={problem.head_dim}, "
    if problem.v_dim != problem.head_dim:
        sizes += f"v_head_dim={problem.v_dim}, "
    if problem.keys != problem.q_tokens:
        sizes += f"kv_seq_len={problem.keys}, "
    if problem.element_bytes in _DTYPES:
        sizes += f"dtype=torch.{_DTYPES[problem.element_bytes]}, "
    if problem.mask in (Mask(), Mask(causal=True)):
        return f"{sizes}causal={problem.mask.causal}"
    return f"{sizes}mask={_mask(problem.mask)}"


_DTYPES = {4: "float32", 8: "float64"}  # bfloat16 need not be said


def _arguments(values: Mapping[str, Any]) -> str:
    said = {name: str(x) if isinstance(x, str) else x for name, x in values.items()}
    return "".join(f", {name}={value!r}" for name, value in said.items())


def _mask(mask: Mask) -> str:
    said = {one.name: getattr(mask, one.name) for one in fields(mask)}
    if mask.slices is not None:  # by the names of kinds, which Python reads
        said["slices"] = tuple((q, k, str(kind)) for q, k, kind in mask.slices)
    unusual = {name: x for name, x in said.items() if x != getattr(Mask(), name)}
    return f"Mask({_arguments(unusual)[2:]})"
