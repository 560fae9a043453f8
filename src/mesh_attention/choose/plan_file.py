"""The plan that a search chose, to keep: as a small file and as a line of Python.

`advise --output plan.json` writes the file, and `ContextParallel(plan="plan.json")` reads it. The
text of a plan has the program of every rank: 86 MB for 256. So the file has the question that the
plan answers, which all ranks answer alike, and a digest of the answer. A version of the library
that would make another plan of the question refuses the file. `advise` and the report show the
line, which users paste.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from mesh_attention.choose.auto import PlanChoice
from mesh_attention.errors import MeshAttentionError, PlanError
from mesh_attention.files import read_text, replacing
from mesh_attention.machine.rates import Costs
from mesh_attention.plan.language.plan import Direction, Plan
from mesh_attention.plan.language.text import HEADER, parse_plan, program_lines
from mesh_attention.plan.methods.question import Question, ask, joined
from mesh_attention.plan.problem.mask import Mask
from mesh_attention.plan.problem.problem import Problem
from mesh_attention.plan.read.agreement import question_digest

FORMAT = "mesh-attention choice 1"
PLAN_FILE = "plan.json"
_MOST_BYTES = 1 << 30  # a plan's own text is taken too
_DTYPES = {4: "float32", 8: "float64"}  # bfloat16 need not be said


def write_choice(path: Path | str, question: Question) -> None:
    """Writes the whole file, or nothing."""
    asked = [question] if question.backward is None else [question, question.backward]
    table = {
        "format": FORMAT,
        "ranks": question.num_ranks,
        "problem": asdict(question.problem),
        "passes": [
            {"directions": part.directions, "method": part.method, "options": _options(part)}
            for part in asked
        ],
        "digest": short_digest(question.plan()),
    }
    write_json(path, table)


def write_json(path: Path | str, table: Mapping[str, Any]) -> None:
    with replacing(path) as part:
        part.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


def read_plan(path: Path | str, num_ranks: int) -> Plan:
    """The plan of the question that `write_choice` wrote, or whose text is in the file."""
    text = read_text(path, most_bytes=_MOST_BYTES)
    if text.startswith(HEADER):
        return parse_plan(text)
    try:
        table = json.loads(text)
        form, ranks = table["format"], table["ranks"]
    except (ValueError, LookupError, TypeError, RecursionError):
        raise _refusal(path, "it is damaged, or was not written by `advise --output`") from None
    if form != FORMAT:
        raise _refusal(path, f"its format is {str(form)[:80]!r}, and this version reads {FORMAT!r}")
    if ranks != num_ranks:
        raise _refusal(path, f"it is for {ranks} ranks, and this group has {num_ranks}")
    try:
        plan, digest = _question(table).plan(), table["digest"]
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise _refusal(path, f"it is damaged: {error}") from error
    if short_digest(plan) != digest:
        raise _refusal(path, "it was changed, or another version of mesh_attention wrote it")
    return plan


def _refusal(path: Path | str, why: str) -> MeshAttentionError:
    return PlanError(
        f"{path}: {why}; `mesh-attention advise --ranks N ... --output {path}` writes a new one"
    )


def _options(question: Question) -> dict[str, Any]:
    """The options that differ from their defaults, with costs as numbers."""
    options = {}
    for option in fields(question.setting):
        value = getattr(question.setting, option.name)
        if value != option.default:
            options[option.name] = asdict(value) if isinstance(value, Costs) else value
    return options


def read_problem(sizes: Mapping[str, Any]) -> Problem:
    """The problem of which `asdict` made these sizes."""
    return Problem(**{**sizes, "mask": Mask(**sizes["mask"])})


def _question(table: dict[str, Any]) -> Question:
    problem = read_problem(table["problem"])
    asked = []
    for part in table["passes"]:
        options = dict(part["options"])
        if "costs" in options:
            options["costs"] = Costs(**options["costs"])
        directions = tuple(map(Direction, part["directions"]))
        how: dict[str, Any] = {"method": part["method"], "directions": directions}
        asked.append(ask(problem, table["ranks"], **how, **options))
    return asked[0] if len(asked) == 1 else joined(*asked)


def short_digest(plan: Plan) -> str:
    """A digest of what was asked and chosen, the order of tasks, and the program of one rank: to
    write out the programs of all ranks takes seconds."""
    sha = hashlib.sha256(question_digest(plan).encode())
    for pass_ in plan.passes:
        lines = [pass_.schedule.text(), *program_lines(pass_.programs[plan.num_ranks // 2])]
        sha.update("\n".join(lines).encode())
    return sha.hexdigest()


def python_line(choice: PlanChoice, file: Path | None = None) -> str:
    """The line that makes an object with the chosen plan: by the options themselves, where these
    make that plan, otherwise by the file of the plan. `file`: where it is written already."""
    options = _options_of_all_passes(choice)
    if options is None:
        line = f"cp = ContextParallel(group, plan={str(file or PLAN_FILE)!r})"
        return line if file else f"{line}  # advise --output {PLAN_FILE} writes it"
    how = f'method="{choice.question.method}"{_arguments(options)}'
    return f"cp = ContextParallel(group, {_sizes(choice.asked.problem)}, {how})"


def default_line(choice: PlanChoice, group: str) -> str:
    """The line for what `find_default` chose: by sizes and options the object chooses the same."""
    sizes, options = _sizes(choice.asked.problem), _arguments(choice.asked.options)
    return f"cp = ContextParallel({group}, {sizes}{options})"


def _options_of_all_passes(choice: PlanChoice) -> dict[str, Any] | None:
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


def _mask(mask: Mask) -> str:
    values = {part.name: getattr(mask, part.name) for part in fields(mask)}
    if mask.slices is not None:  # by the names of kinds, which Python reads
        values["slices"] = tuple((q, k, str(kind)) for q, k, kind in mask.slices)
    unusual = {name: x for name, x in values.items() if x != getattr(Mask(), name)}
    return f"Mask({_arguments(unusual)[2:]})"


def _arguments(values: Mapping[str, Any]) -> str:
    words = {name: str(x) if isinstance(x, str) else x for name, x in values.items()}
    return "".join(f", {name}={value!r}" for name, value in words.items())
