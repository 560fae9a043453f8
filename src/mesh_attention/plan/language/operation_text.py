"""How operations are written and read back: `C-0-0: attend q=q.0[0:512] ... fresh=yes`.

An operation is its fields in turn, each written by its type; there is no other syntax.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any, get_args, get_type_hints

from mesh_attention.errors import PlanTextError
from mesh_attention.plan.language.buffers import Piece
from mesh_attention.plan.language.program import (
    Call,
    CallKind,
    Free,
    MergeRule,
    Move,
    Operation,
    Task,
)

_PIECE = re.compile(r"([^\[\]{}]+)\[(\d+):(\d+)\](?:\{(\d+):(\d+)\})?")
_CALL = re.compile(r"(\w+)\((\d+):(\d+),(\d+):(\d+)\)(?:@([^\s+()@-]+)(?:-(\d+))?)?")


def shortened(text: str, most: int = 200) -> str:
    """What an error shows of a text that may be anything."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


def _piece_text(piece: Piece) -> str:
    heads = f"{{{piece.heads[0]}:{piece.heads[1]}}}" if piece.heads else ""
    return f"{piece.buffer}[{piece.start}:{piece.stop}]{heads}"


def _parse_piece(text: str) -> Piece:
    match = _PIECE.fullmatch(text)
    if not match:
        raise PlanTextError(f"{shortened(repr(text))} is not a piece such as Q.0[0:512]")
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
    rows = f"{call.kind}({call.q_start}:{call.q_stop},{call.k_start}:{call.k_stop})"
    kernel = f"@{call.kernel}" if call.kernel else ""
    return rows + kernel + (f"-{call.leave_sms}" if call.leave_sms else "")


def _parse_call(text: str) -> Call:
    match = _CALL.fullmatch(text)
    if not match:
        wrong = shortened(repr(text))
        raise PlanTextError(f"{wrong} is not a kernel call such as full(0:512,0:1024)")
    kind, *numbers, kernel, leave_sms = match.groups()
    q0, q1, k0, k1 = map(int, numbers)
    return Call(CallKind(kind), q0, q1, k0, k1, kernel or "", int(leave_sms or 0))


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
_PIECE_CODEC = _Codec(_piece_text, _parse_piece)
_PIECES_CODEC = _many(_PIECE_CODEC, "+")
_CODECS: dict[Any, _Codec] = {
    str: _Codec(str, str),
    int: _Codec(str, int),
    bool: _Codec(lambda flag: _YES_NO[flag], lambda text: bool(_YES_NO.index(text))),
    MergeRule: _Codec(str, MergeRule),
    Piece: _PIECE_CODEC,
    Piece | None: _optional(_PIECE_CODEC),
    tuple[str, ...]: _many(_Codec(str, str), "+"),
    tuple[Piece, ...]: _PIECES_CODEC,
    tuple[tuple[Piece, ...], ...]: _many(_PIECES_CODEC, "|"),
    tuple[Move, ...]: _many(_Codec(_move_text, _parse_move), "+"),
    tuple[Call, ...]: _many(_Codec(_call_text, _parse_call), "+"),
}
# AllGather is written all-gather.
_VERB_OF = {
    cls: re.sub("(?<=.)(?=[A-Z])", "-", cls.__name__).lower() for cls in get_args(Operation)
}
_VERBS = {verb: cls for cls, verb in _VERB_OF.items()}
_FIELDS: dict[type, dict[str, _Codec]] = {
    cls: {name: _CODECS[kind] for name, kind in get_type_hints(cls).items() if name != "task"}
    for cls in _VERB_OF
}


def operation_text(op: Operation) -> str:
    fields = _FIELDS[type(op)].items()
    words = [f"{field}={codec.write(getattr(op, field))}" for field, codec in fields]
    return " ".join([f"{op.name}: {_VERB_OF[type(op)]}", *words])


def parse_operation(text: str) -> Operation:
    name, _, rest = text.strip().partition(": ")
    verb, *words = rest.split(" ")
    told = shortened(repr(text))
    if verb not in _VERBS:
        verb = shortened(repr(verb), 40)
        raise PlanTextError(f"{verb} in {told} is not an operation; known: {', '.join(_VERBS)}")
    cls = _VERBS[verb]
    fields = _FIELDS[cls]
    found = dict(word.split("=", 1) for word in words if "=" in word)
    if set(found) != set(fields):
        raise PlanTextError(f"{told} must give exactly: {', '.join(fields)}")
    try:
        values = {field: codec.read(found[field]) for field, codec in fields.items()}
        if cls is not Free:
            values["task"] = Task.parse(name)
    except PlanTextError:
        raise
    except ValueError as error:
        raise PlanTextError(f"{told}: {shortened(str(error))}") from error
    op: Operation = cls(**values)
    return op
