"""The text form of a plan, short enough to read and exact enough to parse back; and its digest.

    rank 0
      buffer Q.0 q element workspace heads 0:64 rows 0:1024,2048:3072
      AG-Q-0: all-gather group=Q0 moves=q[0:512]<Q.0[0:1536]/0,512
      C-0-0: attend q=Q.0[0:1536] k=... calls=full(0:1536,0:1536) fresh=yes

`operation_text.py` writes and reads the lines of operations. Plan files,
golden files and the digests that ranks compare are made here. Text that does not parse raises
`PlanTextError`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

from mesh_attention.errors import PlanTextError
from mesh_attention.machine.target import read_target
from mesh_attention.plan.language.buffers import Buffer, Kind, Precision, Role
from mesh_attention.plan.language.operation_text import operation_text, parse_operation, shortened
from mesh_attention.plan.language.plan import Direction, Pass, Plan, a_plan
from mesh_attention.plan.language.program import Operation, Program
from mesh_attention.plan.language.tasks import Schedule
from mesh_attention.plan.problem.arguments import flag, number
from mesh_attention.plan.problem.layout import Layout, LayoutKind, read_stretches
from mesh_attention.plan.problem.mask import Mask
from mesh_attention.plan.problem.problem import Problem

HEADER = "mesh-attention plan 1"


def _buffer_text(b: Buffer) -> str:
    rows = ",".join(f"{start}:{stop}" for start, stop in b.rows) or "-"
    heads = f"{b.heads[0]}:{b.heads[1]}"
    place = "" if b.offset is None else f" at {b.offset}"
    return f"buffer {b.name} {b.kind} {b.precision} {b.role} heads {heads} rows {rows}{place}"


def _pair(text: str) -> tuple[int, int]:
    start, stop = text.split(":")
    return int(start), int(stop)


def _parse_buffer(text: str) -> Buffer:
    try:
        _, name, kind, precision, role, _, heads, _, rows, *place = text.split()
        if place and (len(place) != 2 or place[0] != "at"):
            raise ValueError(f"{' '.join(place)} is no place")
        return Buffer(
            name,
            Kind(kind),
            () if rows == "-" else tuple(map(_pair, rows.split(","))),
            _pair(heads),
            Precision(precision),
            Role(role),
            int(place[1]) if place else None,
        )
    except ValueError as error:
        raise PlanTextError(shortened(f"{text!r} is not a buffer: {error}")) from error


def plan_lines(plan: Plan) -> Iterator[str]:
    """The text, line by line. What ranks have in common is written once and reused."""
    yield HEADER
    head = {
        "method": a_plan(plan).method,
        "problem": dataclasses.asdict(plan.problem),
        "q_layout": plan.q_layout.to_json(),
        "kv_layout": plan.kv_layout.to_json(),
        "ranks_per_node": plan.ranks_per_node,
        "devices": plan.devices,
    }
    if plan.relayout:
        head["relayout"] = True
    if plan.target is not None:
        head["target"] = plan.target.to_json()
    yield json.dumps(head)
    line_of = cache(_line)
    for pass_ in plan.passes:
        yield f"pass {pass_.direction} {json.dumps(pass_.setting)}"
        for name, ranks in pass_.groups.items():
            yield f"group {name} {','.join(map(str, ranks))}"
        for step in pass_.schedule.text().splitlines():
            yield f"step {step}"
        for program in pass_.programs:
            yield f"rank {program.rank}"
            yield from map(line_of, (*program.buffers, *program.operations))


def program_lines(program: Program) -> list[str]:
    """The lines of one rank in the text of a plan."""
    return [_line(item) for item in (*program.buffers, *program.operations)]


def _line(item: Buffer | Operation) -> str:
    return "  " + (_buffer_text(item) if isinstance(item, Buffer) else operation_text(item))


def plan_text(plan: Plan) -> str:
    return "\n".join(plan_lines(plan)) + "\n"


def digest(plan: Plan) -> str:
    """Equal on two ranks exactly when they hold the same plan: a hash of the whole text."""
    sha = hashlib.sha256()
    for line in plan_lines(plan):
        sha.update(line.encode())
        sha.update(b"\n")
    return sha.hexdigest()


def parse_plan(text: str) -> Plan:
    if not isinstance(text, str):
        raise PlanTextError(f"the text of a plan is a str, not {type(text).__name__}")
    lines = text.splitlines()
    if lines == [HEADER]:
        raise PlanTextError(f"the text ends after its first line, {HEADER!r}")
    if len(lines) < 2 or lines[0] != HEADER:
        raise PlanTextError(f"a plan begins with {HEADER!r}, this text with {_first(lines)}")
    try:
        return _parse(json.loads(lines[1]), lines[2:])
    except PlanTextError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        message = f"not the text of a plan: {type(error).__name__} {error}"
        raise PlanTextError(shortened(message)) from error


def _parse(head: dict[str, Any], lines: list[str]) -> Plan:
    if not lines or not lines[0].startswith("pass "):
        raise PlanTextError(f"the third line of a plan begins a pass, not {_first(lines)}")
    per_node = head["ranks_per_node"]
    return Plan(
        problem=_parse_problem(head["problem"]),
        q_layout=_parse_layout(head["q_layout"]),
        kv_layout=_parse_layout(head["kv_layout"]),
        passes=_parse_passes(lines),
        devices=tuple(number("devices", device, least=0) for device in head["devices"]),
        ranks_per_node=None if per_node is None else number("ranks_per_node", per_node),
        method=_words("method", head["method"]),
        relayout=flag("relayout", head.get("relayout", False)),
        target=None if head.get("target") is None else read_target(head["target"]),
    )


def _words(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise PlanTextError(f"{name} is text, not {type(value).__name__}")
    return value


def _first(lines: list[str]) -> str:
    return shortened(repr(lines[0])) if lines else "nothing"


def _parse_problem(fields: dict[str, Any]) -> Problem:
    mask: dict[str, Any] = {
        k: tuple(v) if isinstance(v, list) else v for k, v in fields["mask"].items()
    }
    return Problem(**{**fields, "mask": Mask(**mask)})


def _parse_layout(fields: dict[str, Any]) -> Layout:
    lists = ("stretches", "order")
    sizes = {n: number(n, v) for n, v in fields.items() if n not in ("kind", *lists)}
    stretches, order = (fields.get(name) for name in lists)
    if not isinstance(order, list | None):
        raise PlanTextError(f"order of a layout is a list, not {type(order).__name__}")
    return Layout(
        LayoutKind(fields["kind"]),
        **sizes,
        stretches=None if stretches is None else read_stretches(stretches),
        order=None if order is None else tuple(number("order", rank, least=0) for rank in order),
    )


def _parse_passes(lines: list[str]) -> tuple[Pass, ...]:
    starts = [i for i, line in enumerate(lines) if line.startswith("pass ")]
    stops = [*starts[1:], len(lines)]
    passes = [_parse_pass(lines[a], lines[a + 1 : b]) for a, b in zip(starts, stops, strict=True)]
    _once("pass", (pass_.direction for pass_ in passes))
    return tuple(passes)


def _parse_pass(head: str, lines: list[str]) -> Pass:
    _, direction, setting = head.split(" ", 2)
    groups: list[tuple[str, tuple[int, ...]]] = []
    steps: list[str] = []
    programs: list[tuple[int, list[Buffer], list[Operation]]] = []
    for line in lines:
        word, _, rest = line.partition(" ")
        if word == "group":
            name, ranks = rest.split(" ")
            groups.append((name, tuple(map(int, ranks.split(",")))))
        elif word == "step":
            steps.append(rest)
        elif word == "rank":
            programs.append((int(rest), [], []))
        elif not programs:
            raise PlanTextError(f"{shortened(repr(line))} stands before the first rank")
        elif line.startswith("  buffer "):
            programs[-1][1].append(_parse_buffer(line.strip()))
        else:
            programs[-1][2].append(parse_operation(line))
    _once("group", (name for name, _ in groups))
    _once("rank", (rank for rank, _, _ in programs))
    for rank, buffers, _ in programs:
        _once(f"rank {rank}: buffer", (buffer.name for buffer in buffers))
    return Pass(
        Direction(direction),
        dict(groups),
        tuple(Program(rank, tuple(b), tuple(ops)) for rank, b, ops in programs),
        Schedule.parse("\n".join(steps)),
        {name: _words(name, value) for name, value in json.loads(setting).items()},
    )


def _once(what: str, names: Iterable[object]) -> None:
    """Refuse a second line of the same name, which would silently replace the first."""
    for name, times in Counter(names).items():
        if times > 1:
            raise PlanTextError(f"{what} {name} is written {times} times")
