"""Files of `mesh-attention tune`: the fastest settings on real ranks, to name in `tuned=`.

One file may answer several questions: a problem, a number of ranks, and options. An answer says all
that its plan depends on, so the plan is the one that was measured, whatever machine reads the file.
Nothing is guessed: a file that is damaged, of another version or without an answer to what is asked
is refused, with the command that makes one.

Beside each answer stands all that was measured for it, so that a tuning that was ended goes on.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from shlex import quote
from typing import Any

from mesh_attention.choose.plan_file import read_problem, write_json
from mesh_attention.choose.scored import options_text, value_text
from mesh_attention.cost.planning import tokens_stay
from mesh_attention.errors import PlanError
from mesh_attention.files import FileError, read_text
from mesh_attention.machine.rates import Costs
from mesh_attention.plan.language.plan import Direction
from mesh_attention.plan.methods.question import Question, ask_passes
from mesh_attention.plan.methods.table import METHODS, all_options, methods_with
from mesh_attention.plan.problem.arguments import number, real
from mesh_attention.plan.problem.problem import Problem, problem_text

VERSION = 1
_MOST_BYTES = 1 << 26
_ONE_NODE = 8  # ranks that one torchrun starts, in the command that measures
_DAMAGE = (ValueError, KeyError, TypeError, AttributeError, RecursionError)

Known = dict[str, float | str]  # by `Scored.key`: seconds, or why it cannot run


@dataclass(frozen=True)
class Wanted:
    """What an answer is for. `options` are the caller's in JSON, without the size of nodes."""

    problem: Problem
    num_ranks: int
    options: str

    @property
    def text(self) -> str:
        options = options_text(json.loads(self.options))
        asked = f"{problem_text(self.problem)}, on {self.num_ranks} ranks"
        return f"{asked}, {options}" if options else asked

    def to_json(self) -> dict[str, Any]:
        options = json.loads(self.options)
        return {"problem": asdict(self.problem), "ranks": self.num_ranks, "options": options}


def wanted(problem: Problem, num_ranks: int, options: Mapping[str, Any] | None = None) -> Wanted:
    """The key of an answer. Options that say the same in other words have the same key."""
    said = {n: x for n, x in (options or {}).items() if x is not None and n != "ranks_per_node"}
    methods_with(said)  # refuses what no method has
    read = {name: all_options()[name][0].read(value) for name, value in said.items()}
    try:
        text = json.dumps(read, sort_keys=True)
    except (TypeError, ValueError):
        names = ", ".join(sorted(read))
        raise PlanError(f"{names}: an option that has no form in a file cannot be tuned") from None
    return Wanted(problem, number("ranks", num_ranks), text)


@dataclass(frozen=True)
class Answer:
    """The method and the options of each pass, and what else the plan depends on. `measured_on` is
    for people."""

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
        """The question whose plan was measured."""
        how: dict[str, Any] = {"ranks_per_node": self.ranks_per_node, "costs": self.costs}
        return ask_passes(problem, num_ranks, self.chosen, **how)

    def to_json(self) -> dict[str, Any]:
        passes = {
            direction.value: {
                "method": method,
                "options": options,
                "seconds": self.pass_seconds[direction],
            }
            for direction, (method, options) in self.chosen.items()
        }
        nodes = {"ranks_per_node": self.ranks_per_node, "costs": asdict(self.costs)}
        return {**passes, **nodes, "measured_on": self.measured_on}


@dataclass(frozen=True)
class TunedEntry:
    """One question of a file. `measured_by` says where and by what `measured` was taken. A tuning
    that was ended early has no answer yet."""

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
        """A digest that is equal where all answers are equal. Ranks compare it."""
        lines = sorted(
            json.dumps({**asked.to_json(), **answer.to_json()}, sort_keys=True)
            for asked, answer in self.answers.items()
        )
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    def answer(
        self, problem: Problem, num_ranks: int, options: Mapping[str, Any] | None = None
    ) -> Answer:
        """The answer to exactly this question. An option of None counts as left out."""
        asked = wanted(problem, num_ranks, options)
        line = tune_line(problem, num_ranks, json.loads(asked.options), self.file)
        answer = self.answers.get(asked)
        if answer is None:
            known = "; ".join(sorted(other.text for other in self.answers)[:3]) or "nothing"
            more = f" and {len(self.answers) - 3} others" if len(self.answers) > 3 else ""
            raise PlanError(
                f"{self.file} has no answer for {asked.text}; it has one for {known}{more}. This "
                f"measures it and adds it to the file: {line}"
            )
        nodes = (options or {}).get("ranks_per_node")
        if nodes not in (None, answer.ranks_per_node):
            raise PlanError(
                f"ranks_per_node={nodes}: the answer of {self.file} was measured with "
                f"{answer.ranks_per_node}; leave it out"
            )
        try:
            stays = tokens_stay(answer.question(problem, num_ranks).plan(), options or {})
        except PlanError as error:
            raise PlanError(
                f"{self.file}: its answer makes no plan: {error}. Measure anew: {line} --again"
            ) from error
        if not stays:  # whoever wrote it: no file moves tokens
            raise PlanError(
                f"{self.file}: its answer has tokens elsewhere than by default. Measure anew: "
                f"{line} --again"
            )
        return answer


def read_tuned(file: Path | str) -> Tuned:
    if not isinstance(file, str | Path):
        raise PlanError(f"tuned={file!r}: must be the name of a file of mesh-attention tune")
    entries = read_entries(file)
    return Tuned(Path(file), {w: e.answer for w, e in entries.items() if e.answer is not None})


def read_entries(file: Path | str) -> dict[Wanted, TunedEntry]:
    """Reads and checks all that a file holds."""
    line = tune_line(None, None, {}, file)
    try:
        text = read_text(file, most_bytes=_MOST_BYTES)
    except FileError as error:
        raise PlanError(f"{error}; tune makes such a file: {line}") from error
    try:
        table = json.loads(text)
        if table["version"] != VERSION:
            raise ValueError(f"it is of version {table['version']!r}, and {VERSION} is read")
        return dict(map(_entry, table["questions"]))
    except _DAMAGE as error:
        what = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise PlanError(
            f"{file} is not a file of mesh-attention tune: {what}; remove it, and make another: "
            f"{line}"
        ) from error


def write_entries(file: Path | str, entries: Mapping[Wanted, TunedEntry]) -> None:
    """Writes the whole file, or nothing."""
    questions = [
        {
            **asked.to_json(),
            "answer": None if entry.answer is None else entry.answer.to_json(),
            "measured_by": entry.measured_by,
            "measured": {
                key: {"cannot_run": x} if isinstance(x, str) else x
                for key, x in entry.measured.items()
            },
        }
        for asked, entry in entries.items()
    ]
    write_json(file, {"version": VERSION, "questions": questions})


def _entry(table: Any) -> tuple[Wanted, TunedEntry]:
    asked = wanted(read_problem(dict(table["problem"])), table["ranks"], table["options"])
    answer = None if table["answer"] is None else _answer(table["answer"], table["options"])
    measured: Known = {
        str(key): str(x["cannot_run"]) if isinstance(x, dict) else real("seconds", x)
        for key, x in table["measured"].items()
    }
    return asked, TunedEntry(answer, dict(table["measured_by"]), measured)


def _answer(table: Any, asked: Mapping[str, Any]) -> Answer:
    """Refuses an answer that contradicts the options `asked`: files are changed by hand too."""
    chosen = {}
    for direction in Direction:
        method = table[direction.value]["method"]
        if method not in METHODS:
            raise ValueError(f"{method!r} is not a method")
        known = METHODS[method].options()
        said = table[direction.value]["options"]
        options = {name: known[name].read(value) for name, value in said.items()}
        for name, value in {"relayout": False, **asked}.items():
            if options.get(name, known[name].default) != known[name].read(value):
                raise ValueError(f"an answer has another {name} than what was asked for")
        chosen[direction] = method, options
    return Answer(
        chosen,
        {d: real("seconds", table[d.value]["seconds"]) for d in Direction},
        number("ranks_per_node", table["ranks_per_node"]),
        Costs(**{name: real(name, value) for name, value in table["costs"].items()}),
        str(table["measured_on"]),
    )


def tune_line(
    problem: Problem | None, num_ranks: int | None, options: Mapping[str, Any], file: Path | str
) -> str:
    """The command that measures a question, as a person would start it. An argument that is None
    becomes a placeholder.

    >>> from mesh_attention.plan.problem.mask import Mask
    >>> problem = Problem(4096, 8, 64, num_kv_heads=2, mask=Mask(window=(128, 0)))
    >>> tune_line(problem, 4, {"tile": (2, 2), "relayout": True}, "tuned.json")
    'torchrun --nproc-per-node 4 -m mesh_attention tune --tokens 4096 --heads 8 --kv-heads 2 \
--head-dim 64 --no-causal --window 128:0 --tile 2x2 --relayout --output tuned.json'
    """
    start = f"--nproc-per-node {num_ranks}" if num_ranks and num_ranks <= _ONE_NODE else "..."
    sizes = ["--tokens N --heads N ..."] if problem is None else _problem_flags(problem)
    flags = [_flag(name, value) for name, value in options.items()]
    words = [*sizes, *flags, f"--output {quote(str(file))}"]
    return f"torchrun {start} -m mesh_attention tune {' '.join(words)}"


def _flag(name: str, value: Any) -> str:
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{flag}" if value else f"--no-{flag}"
    return f"--{flag} {value_text(value)}"


def _problem_flags(problem: Problem) -> Iterator[str]:
    """Flags that differ from the defaults of the command line."""
    yield f"--tokens {problem.q_tokens}"
    if problem.keys != problem.q_tokens:
        yield f"--kv-tokens {problem.keys}"
    yield f"--heads {problem.num_heads}"
    if problem.kv_heads != problem.num_heads:
        yield f"--kv-heads {problem.kv_heads}"
    yield f"--head-dim {problem.head_dim}"
    if problem.v_dim != problem.head_dim:
        yield f"--v-head-dim {problem.v_dim}"
    if problem.element_bytes != 2:
        yield f"--element-bytes {problem.element_bytes}"
    mask = problem.mask
    if mask.slices is not None:
        yield "--slices FILE"
        return
    if mask.causal or mask.window is not None:
        yield _flag("causal", mask.causal)
    if mask.window is not None:
        left, right = ("inf" if side is None else str(side) for side in mask.window)
        yield f"--window {left}:{right}"
    if mask.prefix:
        yield f"--prefix {mask.prefix}"
    for name, starts in (("documents", mask.documents), ("kv-documents", mask.kv_documents)):
        if starts is not None:
            yield f"--{name} {','.join(map(str, starts))}"
