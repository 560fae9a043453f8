"""The text form of a plan, short enough to read and exact enough to parse back; and its digest.

    rank 0
      buffer Q.0 q element workspace heads 0:64 rows 0:1024,2048:3072
      AG-Q-0: all-gather group=Q0 moves=q[0:512]<Q.0[0:1536]/0,512
      C-0-0: attend q=Q.0[0:1536] k=... calls=full(0:1536,0:1536) fresh=yes

One table below says how each field of each operation is written; there is no other syntax.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from mesh_attention.errors import PlanTextError
from mesh_attention.plan.buffers import Buffer, Kind, Piece, Precision, Role
from mesh_attention.plan.layout import Layout, LayoutKind
from mesh_attention.plan.mask import Mask
from mesh_attention.plan.plan import Direction, Pass, Plan
from mesh_attention.plan.problem import Problem
from mesh_attention.plan.program import (
    AllGather,
    AllToAll,
    Attend,
    AttendBackward,
    Call,
    CallKind,
    Free,
    Merge,
    MergeRule,
    Move,
    Operation,
    Program,
    ReduceScatter,
    SendRecv,
)
from mesh_attention.plan.schedule.tasks import Schedule

__all__ = ["digest", "operation_text", "parse_operation", "parse_plan", "plan_lines", "plan_text"]

_HEADER = "mesh-attention plan 1"
_PIECE = re.compile(r"([^\[\]{}]+)\[(\d+):(\d+)\](?:\{(\d+):(\d+)\})?")
_CALL = re.compile(r"(\w+)\((\d+):(\d+),(\d+):(\d+)\)")


def _piece_text(piece: Piece) -> str:
    heads = f"{{{piece.heads[0]}:{piece.heads[1]}}}" if piece.heads else ""
    return f"{piece.buffer}[{piece.start}:{piece.stop}]{heads}"


def _parse_piece(text: str) -> Piece:
    match = _PIECE.fullmatch(text)
    if not match:
        raise PlanTextError(f"{text!r} is not a piece such as Q.0[0:512]")
    name, start, stop, h0, h1 = match.groups()
    return Piece(name, int(start), int(stop), (int(h0), int(h1)) if h0 else None)


def _move_text(move: Move) -> str:
    cuts = ",".join(map(str, move.cuts))
    return f"{_piece_text(move.part)}<{_piece_text(move.whole)}/{cuts}"


def _parse_move(text: str) -> Move:
    pieces, _, cuts = text.partition("/")
    part, _, whole = pieces.partition("<")
    return Move(_parse_piece(part), _parse_piece(whole), tuple(map(int, cuts.split(","))))


def _call_text(call: Call) -> str:
    return f"{call.kind}({call.q_start}:{call.q_stop},{call.k_start}:{call.k_stop})"


def _parse_call(text: str) -> Call:
    match = _CALL.fullmatch(text)
    if not match:
        raise PlanTextError(f"{text!r} is not a kernel call such as full(0:512,0:1024)")
    kind, *numbers = match.groups()
    q0, q1, k0, k1 = map(int, numbers)
    return Call(CallKind(kind), q0, q1, k0, k1)


@dataclasses.dataclass(frozen=True, slots=True)
class _Codec:
    write: Callable[[Any], str]
    read: Callable[[str], Any]


def _many(one: _Codec, separator: str) -> _Codec:
    """A tuple; `-` is the empty one."""
    return _Codec(
        lambda items: separator.join(map(one.write, items)) if items else "-",
        lambda text: () if text == "-" else tuple(map(one.read, text.split(separator))),
    )


def _optional(one: _Codec) -> _Codec:
    return _Codec(
        lambda item: "none" if item is None else one.write(item),
        lambda text: None if text == "none" else one.read(text),
    )


_YES_NO = ("no", "yes")
_STR = _Codec(str, str)
_INT = _Codec(str, int)
_FLAG = _Codec(lambda flag: "yes" if flag else "no", lambda text: bool(_YES_NO.index(text)))
_ONE = _Codec(_piece_text, _parse_piece)
_SOME = _many(_ONE, "+")
_BY_MEMBER = _many(_SOME, "|")
_MOVES = _many(_Codec(_move_text, _parse_move), "+")
_CALLS = _many(_Codec(_call_text, _parse_call), "+")
_RULE = _Codec(str, MergeRule)

_VERBS: dict[str, tuple[type, dict[str, _Codec]]] = {
    "all-gather": (AllGather, {"group": _STR, "moves": _MOVES}),
    "reduce-scatter": (ReduceScatter, {"group": _STR, "moves": _MOVES}),
    "all-to-all": (AllToAll, {"group": _STR, "sends": _BY_MEMBER, "receives": _BY_MEMBER}),
    "send-recv": (
        SendRecv,
        {"group": _STR, "to_member": _INT, "sends": _SOME, "from_member": _INT, "receives": _SOME},
    ),
    "attend": (
        Attend,
        {
            "q": _ONE, "k": _ONE, "v": _ONE, "out": _ONE, "lse": _ONE,
            "calls": _CALLS, "fresh": _FLAG,
        },
    ),
    "attend-backward": (
        AttendBackward,
        {
            "q": _ONE, "k": _ONE, "v": _ONE, "grad_out": _ONE, "lse": _ONE,
            "out": _optional(_ONE), "delta": _optional(_ONE),
            "grad_q": _ONE, "grad_k": _ONE, "grad_v": _ONE,
            "calls": _CALLS, "fresh_q": _FLAG, "fresh_kv": _FLAG,
        },
    ),
    "merge": (Merge, {"rule": _RULE, "inputs": _SOME, "outputs": _SOME}),
    "free": (Free, {"buffers": _many(_STR, "+")}),
}  # fmt: skip
_VERB_OF = {cls: (verb, fields) for verb, (cls, fields) in _VERBS.items()}


def operation_text(op: Operation) -> str:
    verb, fields = _VERB_OF[type(op)]
    words = [f"{field}={codec.write(getattr(op, field))}" for field, codec in fields.items()]
    return " ".join([f"{op.name}: {verb}", *words])


def parse_operation(text: str) -> Operation:
    name, _, rest = text.strip().partition(": ")
    verb, *words = rest.split(" ")
    if verb not in _VERBS:
        raise PlanTextError(f"{verb!r} in {text!r} is not an operation; known: {', '.join(_VERBS)}")
    cls, fields = _VERBS[verb]
    found = dict(word.split("=", 1) for word in words if "=" in word)
    if set(found) != set(fields):
        raise PlanTextError(f"{text!r} must give exactly: {', '.join(fields)}")
    try:
        values = {field: codec.read(found[field]) for field, codec in fields.items()}
    except PlanTextError:
        raise
    except ValueError as error:
        raise PlanTextError(f"{text!r}: {error}") from error
    op: Operation = cls(**values) if cls is Free else cls(name=name, **values)
    return op


def _buffer_text(b: Buffer) -> str:
    rows = ",".join(f"{start}:{stop}" for start, stop in b.rows) or "-"
    heads = f"{b.heads[0]}:{b.heads[1]}"
    return f"buffer {b.name} {b.kind} {b.precision} {b.role} heads {heads} rows {rows}"


def _pair(text: str) -> tuple[int, int]:
    start, stop = text.split(":")
    return int(start), int(stop)


def _parse_buffer(text: str) -> Buffer:
    try:
        _, name, kind, precision, role, _, heads, _, rows = text.split()
        spans = () if rows == "-" else tuple(map(_pair, rows.split(",")))
        return Buffer(name, Kind(kind), spans, _pair(heads), Precision(precision), Role(role))
    except ValueError as error:
        raise PlanTextError(f"{text!r} is not a buffer: {error}") from error


def plan_lines(plan: Plan) -> Iterator[str]:
    """The text, line by line. Objects that ranks share are written out once and reused."""
    yield _HEADER
    head = {
        "method": plan.method,
        "problem": dataclasses.asdict(plan.problem),
        "q_layout": dataclasses.asdict(plan.q_layout),
        "kv_layout": dataclasses.asdict(plan.kv_layout),
        "ranks_per_node": plan.ranks_per_node,
        "devices": plan.devices,
    }
    yield json.dumps(head)
    seen: dict[int, str] = {}

    def once(item: Any, write: Callable[[Any], str]) -> str:
        text = seen.get(id(item))
        if text is None:
            text = seen[id(item)] = "  " + write(item)
        return text

    for one in plan.passes:
        yield f"pass {one.direction} {json.dumps(one.setting)}"
        for name, ranks in one.groups.items():
            yield f"group {name} {','.join(map(str, ranks))}"
        for step in one.schedule.text().splitlines():
            yield f"step {step}"
        for program in one.programs:
            yield f"rank {program.rank}"
            for buffer in program.buffers:
                yield once(buffer, _buffer_text)
            for op in program.operations:
                yield once(op, operation_text)


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
    lines = text.splitlines()
    if len(lines) < 2 or lines[0] != _HEADER:
        raise PlanTextError(f"a plan begins with {_HEADER!r}, this text with {lines[:1]}")
    try:
        return _parse(json.loads(lines[1]), lines[2:])
    except PlanTextError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise PlanTextError(f"not the text of a plan: {type(error).__name__} {error}") from error


def _parse(head: dict[str, Any], lines: list[str]) -> Plan:
    if not lines or not lines[0].startswith("pass "):
        raise PlanTextError(f"the third line of a plan begins a pass, not {lines[:1]}")
    return Plan(
        problem=_parse_problem(head["problem"]),
        q_layout=_parse_layout(head["q_layout"]),
        kv_layout=_parse_layout(head["kv_layout"]),
        passes=tuple(_parse_passes(lines)),
        devices=tuple(head["devices"]),
        ranks_per_node=head["ranks_per_node"],
        method=head["method"],
    )


def _parse_problem(fields: dict[str, Any]) -> Problem:
    mask: dict[str, Any] = {
        k: tuple(v) if isinstance(v, list) else v for k, v in fields["mask"].items()
    }
    return Problem(**{**fields, "mask": Mask(**mask)})


def _parse_layout(fields: dict[str, Any]) -> Layout:
    return Layout(**{**fields, "kind": LayoutKind(fields["kind"])})


def _parse_passes(lines: list[str]) -> Iterator[Pass]:
    starts = [i for i, line in enumerate(lines) if line.startswith("pass ")]
    for start, stop in zip(starts, [*starts[1:], len(lines)], strict=True):
        _, direction, setting = lines[start].split(" ", 2)
        groups: dict[str, tuple[int, ...]] = {}
        steps: list[str] = []
        programs: list[tuple[int, list[Buffer], list[Operation]]] = []
        for line in lines[start + 1 : stop]:
            word, _, rest = line.partition(" ")
            if word == "group":
                name, ranks = rest.split(" ")
                groups[name] = tuple(map(int, ranks.split(",")))
            elif word == "step":
                steps.append(rest)
            elif word == "rank":
                programs.append((int(rest), [], []))
            elif not programs:
                raise PlanTextError(f"{line!r} stands before the first rank")
            elif line.startswith("  buffer "):
                programs[-1][1].append(_parse_buffer(line.strip()))
            else:
                programs[-1][2].append(parse_operation(line))
        yield Pass(
            Direction(direction),
            groups,
            tuple(Program(rank, tuple(b), tuple(ops)) for rank, b, ops in programs),
            Schedule.parse("\n".join(steps)),
            json.loads(setting),
        )
