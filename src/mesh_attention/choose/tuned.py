"""Files of `mesh-attention tune`: what was the fastest on real ranks, for whoever names the file.

One file may answer several questions: a problem, a number of ranks, and options. An answer says all
that its plan depends on, so the plan is the one that was measured, whatever machine reads the file.
Nothing is guessed: a file that is damaged, of another version or without an answer to what is asked
is refused, with the line that makes one.

Beside each answer stands all that was measured for it, so that a tuning that was ended goes on.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from math import inf
from pathlib import Path
from typing import Any

from mesh_attention.choose.tune_line import options_text, tune_line
from mesh_attention.cost.planning import tokens_stay
from mesh_attention.errors import PlanError
from mesh_attention.files import FileError, read_text, replacing
from mesh_attention.machine.rates import Costs
from mesh_attention.plan.language.plan import Direction
from mesh_attention.plan.methods.question import Question, ask_passes
from mesh_attention.plan.methods.table import METHODS, all_options, methods_with
from mesh_attention.plan.problem.arguments import number, real
from mesh_attention.plan.problem.mask import Mask
from mesh_attention.plan.problem.problem import Problem, problem_text

VERSION = 1
_MOST_BYTES = 1 << 26
_DAMAGE = (ValueError, KeyError, TypeError, AttributeError, RecursionError)

Known = dict[str, float | str]  # by `Scored.key`: seconds, or why it cannot run


@dataclass(frozen=True)
class Wanted:
    """What an answer is for. `options`, in JSON: the caller's, but for the size of nodes."""

    problem: Problem
    num_ranks: int
    options: str

    @property
    def text(self) -> str:
        said = options_text(json.loads(self.options))
        return f"{problem_text(self.problem)}, on {self.num_ranks} ranks{said and f', {said}'}"

    def to_json(self) -> dict[str, Any]:
        options = json.loads(self.options)
        return {"problem": asdict(self.problem), "ranks": self.num_ranks, "options": options}


def wanted(problem: Problem, num_ranks: int, options: Mapping[str, Any] | None = None) -> Wanted:
    """Options that say the same in other words are the same."""
    given = {n: x for n, x in (options or {}).items() if x is not None and n != "ranks_per_node"}
    methods_with(given)  # refuses what no method has
    read = {name: all_options()[name][0].read(value) for name, value in given.items()}
    return Wanted(problem, number("ranks", num_ranks), _json(read))


def _json(options: Mapping[str, Any]) -> str:
    try:
        return json.dumps(options, sort_keys=True)
    except (TypeError, ValueError):
        names = ", ".join(sorted(options))
        raise PlanError(f"{names}: an option that has no form in a file cannot be tuned") from None


@dataclass(frozen=True)
class Answer:
    """Method and options of each pass and what else its plan depends on. `measured_on` is for
    people."""

    chosen: dict[Direction, tuple[str, dict[str, Any]]]
    pass_seconds: dict[Direction, float]
    ranks_per_node: int
    costs: Costs
    measured_on: str

    @property
    def seconds(self) -> float:
        return sum(self.pass_seconds.values())

    @property
    def text(self) -> str:
        words = [f"{method} {options_text(how)}".strip() for method, how in self.chosen.values()]
        return words[0] if words[0] == words[1] else f"{words[0]}, backward {words[1]}"

    def question(self, problem: Problem, num_ranks: int) -> Question:
        """What makes the plan that was measured."""
        how: dict[str, Any] = {"ranks_per_node": self.ranks_per_node, "costs": self.costs}
        return ask_passes(problem, num_ranks, self.chosen, **how)

    def to_json(self) -> dict[str, Any]:
        passes = {
            one.value: {"method": method, "options": options, "seconds": self.pass_seconds[one]}
            for one, (method, options) in self.chosen.items()
        }
        nodes = {"ranks_per_node": self.ranks_per_node, "costs": asdict(self.costs)}
        return {**passes, **nodes, "measured_on": self.measured_on}


@dataclass(frozen=True)
class TunedEntry:
    """One question of a file. `measured`, where and by what is in `measured_by`; a tuning that was
    ended before its first answer has none."""

    answer: Answer | None = None
    measured_by: dict[str, Any] = field(default_factory=dict)
    measured: Known = field(default_factory=dict)


@dataclass(frozen=True)
class Tuned:
    """The answers of a file."""

    file: Path
    answers: dict[Wanted, Answer]

    @cached_property
    def digest(self) -> str:
        """Equal where all answers are: ranks compare it."""
        told = sorted(
            json.dumps({**one.to_json(), **answer.to_json()}, sort_keys=True)
            for one, answer in self.answers.items()
        )
        return hashlib.sha256("\n".join(told).encode()).hexdigest()

    def answer(
        self, problem: Problem, num_ranks: int, options: Mapping[str, Any] | None = None
    ) -> Answer:
        """To exactly this; the options are those that the caller gives, and None is not given."""
        asked = wanted(problem, num_ranks, options)
        line = tune_line(problem, num_ranks, json.loads(asked.options), self.file)
        found = self.answers.get(asked)
        if found is None:
            known = "; ".join(sorted(one.text for one in self.answers)[:3]) or "nothing"
            more = f" and {len(self.answers) - 3} others" if len(self.answers) > 3 else ""
            raise PlanError(
                f"{self.file} has no answer for {asked.text}; it has one for {known}{more}. This "
                f"measures it and adds it to the file: {line}"
            )
        nodes = (options or {}).get("ranks_per_node")
        if nodes not in (None, found.ranks_per_node):
            raise PlanError(
                f"ranks_per_node={nodes}: the answer of {self.file} was measured with "
                f"{found.ranks_per_node}; leave it out"
            )
        try:
            stays = tokens_stay(found.question(problem, num_ranks).plan(), options or {})
        except PlanError as error:
            raise PlanError(
                f"{self.file}: its answer makes no plan: {error}. Measure anew: {line} --again"
            ) from error
        if not stays:  # whoever wrote it: no file moves tokens
            raise PlanError(
                f"{self.file}: its answer has tokens elsewhere than by default. Measure anew: "
                f"{line} --again"
            )
        return found


def read_tuned(file: Path | str) -> Tuned:
    if not isinstance(file, str | Path):
        raise PlanError(f"tuned={file!r}: must be the name of a file of mesh-attention tune")
    answers = {one: entry.answer for one, entry in read_entries(file).items()}
    return Tuned(Path(file), {one: answer for one, answer in answers.items() if answer is not None})


def read_entries(file: Path | str) -> dict[Wanted, TunedEntry]:
    """All that a file holds, checked."""
    line = tune_line(None, None, {}, file)
    try:
        text = read_text(file, most_bytes=_MOST_BYTES)
    except FileError as error:
        raise PlanError(f"{error}; tune makes such a file: {line}") from error
    try:
        told = json.loads(text)
        if told["version"] != VERSION:
            raise ValueError(f"it is of version {told['version']!r}, and {VERSION} is read")
        return dict(_entry(one) for one in told["questions"])
    except _DAMAGE as error:
        what = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise PlanError(
            f"{file} is not a file of mesh-attention tune: {what}; remove it, and make another: "
            f"{line}"
        ) from error


def write_entries(file: Path | str, entries: Mapping[Wanted, TunedEntry]) -> None:
    """Whole, or not at all."""
    questions = [
        {
            **one.to_json(),
            "answer": None if entry.answer is None else entry.answer.to_json(),
            "measured_by": entry.measured_by,
            "measured": {
                key: {"cannot_run": x} if isinstance(x, str) else x
                for key, x in entry.measured.items()
            },
        }
        for one, entry in entries.items()
    ]
    told = {"version": VERSION, "questions": questions}
    with replacing(file) as part:
        part.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


def _entry(told: Any) -> tuple[Wanted, TunedEntry]:
    sizes = dict(told["problem"])
    problem = Problem(**{**sizes, "mask": Mask(**sizes["mask"])})
    one = wanted(problem, told["ranks"], told["options"])
    answer = None if told["answer"] is None else _answer(told["answer"], told["options"])
    measured: Known = {
        str(key): str(x["cannot_run"]) if isinstance(x, dict) else _seconds(x)
        for key, x in told["measured"].items()
    }
    return one, TunedEntry(answer, dict(told["measured_by"]), measured)


def _answer(told: Any, asked: Mapping[str, Any]) -> Answer:
    """Files are changed by hand too: an answer says how to run, not what callers have."""
    chosen = {}
    for direction in Direction:
        one = told[direction.value]
        if one["method"] not in METHODS:
            raise ValueError(f"{one['method']!r} is no method")
        known = METHODS[one["method"]].options()
        options = {name: known[name].read(value) for name, value in one["options"].items()}
        for name, value in {"relayout": False, **asked}.items():
            if options.get(name, known[name].default) != known[name].read(value):
                raise ValueError(f"an answer has another {name} than what was asked for")
        chosen[direction] = one["method"], options
    return Answer(
        chosen,
        {one: _seconds(told[one.value]["seconds"]) for one in Direction},
        number("ranks_per_node", told["ranks_per_node"]),
        Costs(**{name: real(name, value) for name, value in told["costs"].items()}),
        str(told["measured_on"]),
    )


def _seconds(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < inf:
        raise ValueError(f"{value!r} is no time")
    return float(value)
