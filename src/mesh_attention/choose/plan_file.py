"""The plan that a search chose, in a small file: `advise --output plan.json` writes it and
`ContextParallel(plan="plan.json")` reads it.

The text of a plan has the program of every rank: 86 MB for 256. So the file has the question that
the plan answers, which all ranks answer alike, and a digest of the answer. A version of the library
that would make another plan of the question refuses the file.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

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
_MOST_BYTES = 1 << 30  # a plan's own text is taken too


def write_choice(path: Path | str, question: Question) -> None:
    """Whole, or not at all."""
    asked = [question] if question.backward is None else [question, question.backward]
    told = {
        "format": FORMAT,
        "ranks": question.num_ranks,
        "problem": asdict(question.problem),
        "passes": [
            {"directions": one.directions, "method": one.method, "options": _options(one)}
            for one in asked
        ],
        "digest": short_digest(question.plan()),
    }
    with replacing(path) as part:
        part.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


def read_plan(path: Path | str, num_ranks: int) -> Plan:
    """Of the question that `write_choice` wrote, or the plan whose text is in the file."""
    text = read_text(path, most_bytes=_MOST_BYTES)
    if text.startswith(HEADER):
        return parse_plan(text)
    try:
        told = json.loads(text)
        form, ranks = told["format"], told["ranks"]
    except (ValueError, LookupError, TypeError, RecursionError):
        raise _refusal(path, "it is damaged, or was not written by `advise --output`") from None
    if form != FORMAT:
        raise _refusal(path, f"its format is {str(form)[:80]!r}, and this version reads {FORMAT!r}")
    if ranks != num_ranks:
        raise _refusal(path, f"it is for {ranks} ranks, and this group has {num_ranks}")
    try:
        plan, digest = _question(told).plan(), told["digest"]
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
    """Those that are not as by default; costs as numbers."""
    setting = question.setting
    given = {one.name: (getattr(setting, one.name), one.default) for one in fields(setting)}
    return {
        name: asdict(value) if isinstance(value, Costs) else value
        for name, (value, default) in given.items()
        if value != default
    }


def _question(told: dict[str, Any]) -> Question:
    sizes = told["problem"]
    problem = Problem(**{**sizes, "mask": Mask(**sizes["mask"])})
    asked = []
    for one in told["passes"]:
        options = dict(one["options"])
        if "costs" in options:
            options["costs"] = Costs(**options["costs"])
        how = {"method": one["method"], "directions": tuple(map(Direction, one["directions"]))}
        asked.append(ask(problem, told["ranks"], **how, **options))
    return asked[0] if len(asked) == 1 else joined(*asked)


def short_digest(plan: Plan) -> str:
    """Of what was asked and chosen, the order of tasks, and the program of one rank: to write out
    those of all takes seconds."""
    sha = hashlib.sha256(question_digest(plan).encode())
    for one in plan.passes:
        lines = [one.schedule.text(), *program_lines(one.programs[plan.num_ranks // 2])]
        sha.update("\n".join(lines).encode())
    return sha.hexdigest()
