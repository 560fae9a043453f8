"""How operations are written and read back: `C-0-0: attend q=q.0[0:512] ... fresh=yes`.

An operation is its fields in turn, each written by its type; there is no other syntax. `text.py`
puts these lines together. Text that does not parse raises `PlanTextError`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
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

_PIECE_TEXT = re.compile(r"([^\[\]{}]+)\[(\d+):(\d+)\](?:\{(\d+):(\d+)\})?")
_CALL_TEXT = re.compile(r"(\w+)\((\d+):(\d+),(\d+):(\d+)\)(?:@([^\s+()@-]+)(?:-(\d+))?)?")


def shortened(text: str, most: int = 200) -> str:
    """What an error shows of a text that may be long.

    >>> shortened("as long", 7), shortened("too long", 7)
    ('as long', 'too ...')
    """
    return text if len(text) <= most else f"{text[: most - 3]}..."


def _piece_text(piece: Piece) -> str:
    heads = f"{{{piece.heads[0]}:{piece.heads[1]}}}" if piece.heads else ""
    return f"{piece.buffer}[{piece.start}:{piece.stop}]{heads}"


def _parse_piece(text: str) -> Piece:
    match = _PIECE_TEXT.fullmatch(text)
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


def _parse_call(text: str) -> Call:
    match = _CALL_TEXT.fullmatch(text)
    if not match:
        raise PlanTextError(f"{shortened(repr(text))} is not a call such as full(0:512,0:1024)")
    kind, *rows, kernel, leave_sms = match.groups()
    q_start, q_stop, k_start, k_stop = map(int, rows)
    margin = int(leave_sms or 0)
    return Call(CallKind(kind), q_start, q_stop, k_start, k_stop, kernel or "", margin)


_Codec = tuple[Callable[[Any], str], Callable[[str], Any]]  # how a type is written, and read


def _many(codec: _Codec, separator: str) -> _Codec:
    """A tuple; `-` is the empty one."""
    write, read = codec
    return (
        lambda items: separator.join(map(write, items)) if items else "-",
        lambda text: () if text == "-" else tuple(map(read, text.split(separator))),
    )


_TEXT: _Codec = (str, str)
_PIECE: _Codec = (_piece_text, _parse_piece)
_PIECES = _many(_PIECE, "+")
_CODECS: dict[Any, _Codec] = {
    str: _TEXT,
    int: (str, int),
    bool: (lambda flag: "yes" if flag else "no", lambda text: ("no", "yes").index(text) == 1),
    MergeRule: (str, MergeRule),
    Piece: _PIECE,
    Piece | None: (
        lambda piece: "none" if piece is None else _piece_text(piece),
        lambda text: None if text == "none" else _parse_piece(text),
    ),
    tuple[str, ...]: _many(_TEXT, "+"),
    tuple[Piece, ...]: _PIECES,
    Sequence[tuple[Piece, ...]]: _many(_PIECES, "|"),
    tuple[Move, ...]: _many((_move_text, _parse_move), "+"),
    tuple[Call, ...]: _many((str, _parse_call), "+"),
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
    words = [f"{field}={write(getattr(op, field))}" for field, (write, _) in fields]
    return " ".join([f"{op.name}: {_VERB_OF[type(op)]}", *words])


def parse_operation(text: str) -> Operation:
    name, _, rest = text.strip().partition(": ")
    verb, *words = rest.split(" ")
    shown = shortened(repr(text))
    if verb not in _VERBS:
        verb = shortened(repr(verb), 40)
        raise PlanTextError(f"{verb} in {shown} is not an operation; known: {', '.join(_VERBS)}")
    cls = _VERBS[verb]
    fields = _FIELDS[cls]
    texts = dict(word.split("=", 1) for word in words if "=" in word)
    if set(texts) != set(fields):
        raise PlanTextError(f"{shown} must give exactly: {', '.join(fields)}")
    try:
        values = {field: read(texts[field]) for field, (_, read) in fields.items()}
        if cls is not Free:
            values["task"] = Task.parse(name)
    except PlanTextError:
        raise
    except ValueError as error:
        raise PlanTextError(f"{shown}: {shortened(str(error))}") from error
    op: Operation = cls(**values)
    return op
