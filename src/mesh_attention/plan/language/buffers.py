"""Named buffers and pieces of them: what a program's operations read and write.

Builders of plans declare buffers, and every reader of programs looks them up. A buffer says what it
holds: a kind of tensor, which rows (intervals of places, in the order in which they lie in memory),
which heads, and in which precision. So coverage, bytes and lifetimes follow from the program alone.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields
from enum import StrEnum
from typing import Any, TypeVar, dataclass_transform

from mesh_attention.plan.problem.problem import Problem
from mesh_attention.plan.problem.spans import Spans, slice_spans

T = TypeVar("T")


class Value:
    """A base with a slot for the remembered hash, which is None until it is known."""

    __slots__ = ("_hash",)


@dataclass_transform(frozen_default=True)
def value(cls: type[T]) -> type[T]:
    """A frozen dataclass that computes its hash once: readers often look operations up by value,
    and ranks share most of them."""
    made: Any = dataclass(frozen=True, slots=True)(cls)
    hash_of_fields, remember = made.__hash__, Value._hash.__set__  # type: ignore[attr-defined]

    def remembered(self: Any) -> int:
        known: int | None = self._hash
        if known is None:
            known = hash_of_fields(self)
            remember(self, known)
        return known

    made.__hash__ = remembered
    made.__init__ = _init_of(made)
    made.__setstate__ = lambda self, state: made.__init__(self, *state)
    return made  # type: ignore[no-any-return]


def _init_of(cls: Any) -> Any:
    """An `__init__` like a frozen dataclass's that sets fields through their slots, and remembered
    slots to None. A plan makes thousands of values, and looking up each field by name, or finding a
    slot empty, would take most of that time."""
    names = [field.name for field in fields(cls)]
    empty = [slot for base in cls.__mro__[1:] for slot in getattr(base, "__slots__", ())]
    scope: dict[str, Any] = {f"set_{name}": getattr(cls, name).__set__ for name in names + empty}
    scope |= {f"default_{f.name}": f.default for f in fields(cls) if f.default is not MISSING}
    parameters = [
        f"{name}=default_{name}" if f"default_{name}" in scope else name for name in names
    ]
    body = [f"set_{name}(self, {name})" for name in names]
    body += [f"set_{slot}(self, None)" for slot in empty]
    exec(f"def __init__(self, {', '.join(parameters)}): {'; '.join(body)}", scope)
    made = scope["__init__"]
    made.__qualname__, made.__module__ = f"{cls.__qualname__}.__init__", cls.__module__
    made.__annotations__ = cls.__init__.__annotations__
    return made


class Precision(StrEnum):
    """How many bytes an element of a buffer has."""

    ELEMENT = "element"  # the dtype of the caller's tensors, and of what travels
    ACCUMULATE = "accumulate"  # fp32 (fp64 for fp64 tensors)

    __hash__ = str.__hash__  # that of an Enum is a function of Python, and plans hash many

    def num_bytes(self, problem: Problem) -> int:
        element = self is Precision.ELEMENT
        return problem.element_bytes if element else problem.accumulate_bytes


class Kind(StrEnum):
    """What a buffer holds. Partial outputs and gradients have the kind of what they become.

    is_statistic   one number a row and head, kept apart when volumes are given in units
    precision      in which callers hold it and in which it travels
    """

    Q = "q"
    K = "k"
    V = "v"
    OUT = "out"
    LSE = "lse"
    GRAD_OUT = "grad_out"
    DELTA = "delta"
    GRAD_Q = "grad_q"
    GRAD_K = "grad_k"
    GRAD_V = "grad_v"

    is_key_side: bool
    is_statistic: bool
    precision: Precision

    def __init__(self, name: str) -> None:
        self.is_key_side = name in ("k", "v", "grad_k", "grad_v")
        self.is_statistic = name in ("lse", "delta")
        self.precision = Precision.ACCUMULATE if self.is_statistic else Precision.ELEMENT

    __hash__ = str.__hash__

    def width(self, problem: Problem) -> int:
        """Elements of one row and head."""
        if self.is_statistic:
            return 1
        return problem.v_dim if self in _VALUE_WIDE else problem.head_dim


# A tuple: looking through four members takes less time than computing a hash.
_VALUE_WIDE = (Kind.V, Kind.OUT, Kind.GRAD_OUT, Kind.GRAD_V)


class Role(StrEnum):
    """Whose memory a buffer is. A kept buffer is a tensor of its own that a forward program leaves
    to the backward program of its rank, where the buffer of the same name is recalled."""

    INPUT = "input"
    OUTPUT = "output"
    WORKSPACE = "workspace"
    KEPT = "kept"
    RECALLED = "recalled"

    __hash__ = str.__hash__

    @property
    def is_filled(self) -> bool:
        """Whether it has its values before the program begins."""
        return self is Role.INPUT or self is Role.RECALLED


class _Sized(Value):
    """A base with slots for the remembered number of rows, and of bytes in a problem."""

    __slots__ = ("_num_bytes", "_num_rows")


@value
class Buffer(_Sized):
    """Memory of one rank: the rows that it holds, by places (`Layout`), and their heads."""

    name: str
    kind: Kind
    rows: Spans
    heads: tuple[int, int]
    precision: Precision = Precision.ELEMENT
    role: Role = Role.WORKSPACE
    offset: int | None = None  # bytes from the begin of the workspace, where it is placed

    def __hash__(self) -> int:
        """Of the first and the last rows: there may be many stretches."""
        rows = self.rows[:1], self.rows[-1:]
        return hash((self.name, rows, self.heads, self.precision, self.role, self.offset))

    @property
    def num_rows(self) -> int:
        """Counted once: gathered rows may be many stretches."""
        rows: int | None = self._num_rows  # type: ignore[attr-defined]
        if rows is None:
            rows = sum([stop - start for start, stop in self.rows])
            object.__setattr__(self, "_num_rows", rows)
        return rows

    def with_num_rows(self, num_rows: int) -> Buffer:
        """This buffer, which need not count them: its builder knows how many there are."""
        object.__setattr__(self, "_num_rows", num_rows)
        return self

    @property
    def num_heads(self) -> int:
        return self.heads[1] - self.heads[0]

    def num_bytes(self, problem: Problem) -> int:
        """Counted once for the problem that was asked for last."""
        known: tuple[Problem, int] | None = self._num_bytes  # type: ignore[attr-defined]
        if known is None or known[0] is not problem:
            known = problem, self.num_rows * self.row_bytes(problem) * self.num_heads
            object.__setattr__(self, "_num_bytes", known)
        return known[1]

    def at(self, offset: int | None) -> Buffer:
        """The same buffer, placed there."""
        fields = self.name, self.kind, self.rows, self.heads, self.precision, self.role
        made = Buffer(*fields, offset)
        for name in ("_num_bytes", "_num_rows"):
            object.__setattr__(made, name, getattr(self, name))
        return made

    def row_bytes(self, problem: Problem) -> int:
        """Bytes of one row of one head."""
        return self.kind.width(problem) * self.precision.num_bytes(problem)


@value
class Piece(Value):
    """Rows `start..stop` of a buffer, counted inside the buffer; `heads` too, None = all."""

    buffer: str
    start: int
    stop: int
    heads: tuple[int, int] | None = None

    @property
    def num_rows(self) -> int:
        return self.stop - self.start

    def num_heads(self, buffer: Buffer) -> int:
        return buffer.num_heads if self.heads is None else self.heads[1] - self.heads[0]

    def heads_of(self, buffer: Buffer) -> tuple[int, int]:
        """The heads of the tensor that this piece holds."""
        first, last = self.heads or (0, buffer.num_heads)
        return buffer.heads[0] + first, buffer.heads[0] + last

    def num_bytes(self, buffer: Buffer, problem: Problem) -> int:
        return self.num_rows * self.num_heads(buffer) * buffer.row_bytes(problem)

    def cut(self, start: int, stop: int) -> Piece:
        """These rows of the piece, counted inside it."""
        return Piece(self.buffer, self.start + start, self.start + stop, self.heads)

    def overlaps(self, other: Piece) -> bool:
        """Whether two pieces of the same buffer share a row and a head."""
        if not (self.start < other.stop and other.start < self.stop):
            return False
        if self.heads is None or other.heads is None:
            return True
        return self.heads[0] < other.heads[1] and other.heads[0] < self.heads[1]

    def spans(self, buffer: Buffer) -> Spans:
        """The places of these rows."""
        return slice_spans(buffer.rows, self.start, self.stop)
