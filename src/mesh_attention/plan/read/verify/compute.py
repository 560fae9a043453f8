"""What attentions and merges mean on symbolic memory: they change what cells are known to cover.

The machine calls `SymbolicCompute` for every rank in turn; an operation that is wrong raises
`Broken`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial

from mesh_attention.plan.language.buffers import Kind, Piece
from mesh_attention.plan.language.plan import Pass, Plan
from mesh_attention.plan.language.program import Attend, AttendBackward, Call, Merge, MergeRule
from mesh_attention.plan.problem.spans import Spans
from mesh_attention.plan.read.verify.atoms import Atoms, BufferCells
from mesh_attention.plan.read.verify.calls import RowMap, calls_fault
from mesh_attention.plan.read.verify.memory import DATA, Broken, Content, Memory, Partial
from mesh_attention.plan.read.verify.structure import CALLER_KINDS


class SymbolicCompute:
    """Runs the attentions and merges of all ranks of a pass on `memory`."""

    def __init__(self, plan: Plan, pass_: Pass, atoms: Atoms, memory: Memory) -> None:
        self._plan = plan
        self._atoms = atoms
        self._memory = memory
        self._final = (*CALLER_KINDS[pass_.direction][0], Kind.DELTA)
        self._q_rows = cache(partial(RowMap, plan.q_layout))
        self._k_rows = cache(partial(RowMap, plan.kv_layout))
        self._checked: dict[tuple[Spans, Spans, tuple[Call, ...]], str | None] = {}
        # By the cells of a buffer, rows and heads: a block has the same keys on every rank.
        self._known_keys: dict[tuple[BufferCells, int, int, object], dict[int, int]] = {}

    def attend(self, rank: int, op: Attend) -> None:
        self._expect(rank, op.q, Kind.Q)
        keys = self._keys(rank, op.k, op.v)
        self._check_calls(rank, op.q, op.k, op.calls)
        self._same_rows(rank, (op.q, op.out, op.lse))
        old_out = self._accumulated(rank, op.out, op.fresh, Kind.OUT)
        old_lse = self._accumulated(rank, op.lse, op.fresh, Kind.LSE)
        new: list[Content] = []
        labels = self._memory.labels(rank, op.q)
        for (atom, head), out, lse in zip(labels, old_out, old_lse, strict=True):
            if out != lse or out.scaled_to is not None:
                names = f"{op.out.buffer} and {op.lse.buffer}"
                raise Broken(rank, f"{names} are not over the same keys")
            added = keys.get(self._atoms.kv_head_of[head], 0) & self._atoms.required[atom]
            new.append(_with(rank, op.out.buffer, out, added))
        self._memory.write(rank, op.out, new, accumulates=not op.fresh)
        self._memory.write(rank, op.lse, new, accumulates=not op.fresh)

    def attend_backward(self, rank: int, op: AttendBackward) -> None:
        atoms = self._atoms
        if (op.out is None) == (op.delta is None):
            raise Broken(rank, "needs either out or delta")
        kinds = (Kind.Q, Kind.GRAD_OUT, Kind.LSE, Kind.OUT, Kind.DELTA)
        pieces = (op.q, op.grad_out, op.lse, op.out, op.delta)
        for piece, kind in zip(pieces, kinds, strict=True):
            if piece is not None:
                self._expect(rank, piece, kind)
        self._same_rows(rank, [piece for piece in (*pieces, op.grad_q) if piece is not None])
        self._same_rows(rank, (op.k, op.v, op.grad_k, op.grad_v))
        keys = self._keys(rank, op.k, op.v)
        self._check_calls(rank, op.q, op.k, op.calls)
        queries: dict[int, int] = {}  # of each KV head, as bits
        for atom, head in self._memory.labels(rank, op.q):
            bit = 1 << (atom * atoms.num_heads + head)
            kv_head = atoms.kv_head_of[head]
            queries[kv_head] = queries.get(kv_head, 0) | bit
        by_query_head = {h: keys.get(kv_head, 0) for h, kv_head in enumerate(atoms.kv_head_of)}
        self._add(rank, op.grad_q, Kind.GRAD_Q, op.fresh_q, by_query_head, atoms.required)
        for piece, kind in ((op.grad_k, Kind.GRAD_K), (op.grad_v, Kind.GRAD_V)):
            self._add(rank, piece, kind, op.fresh_kv, queries, atoms.required_by_key)

    def _add(
        self,
        rank: int,
        piece: Piece,
        kind: Kind,
        fresh: bool,
        computed: dict[int, int],
        required: list[int],
    ) -> None:
        """Add pairs to a gradient: those of `computed`, by head, that are required of each atom."""
        before = self._accumulated(rank, piece, fresh, kind)
        sums: list[Content] = [
            _with(rank, piece.buffer, old, computed.get(head, 0) & required[atom])
            for (atom, head), old in zip(self._memory.labels(rank, piece), before, strict=True)
        ]
        self._memory.write(rank, piece, sums, accumulates=not fresh)

    def merge(self, rank: int, op: Merge) -> None:
        kind = self._check_operands(rank, op)
        inputs = [self._memory.read(rank, piece) for piece in op.inputs]
        size = len(self._memory.labels(rank, op.outputs[0]))
        name = op.outputs[0].buffer
        if kind in self._final and not op.inputs:
            results: list[Content] = self._of_nothing(rank, op.outputs[0])
        elif op.rule is MergeRule.DELTA:
            if any(value is not DATA for values in inputs for value in values):
                raise Broken(rank, "takes delta of something that is not final")
            results = [DATA] * size
        elif op.rule is MergeRule.SOFTMAX:
            for out, lse in zip(inputs[::2], inputs[1::2], strict=True):
                if out != lse or any(isinstance(v, Partial) and v.scaled_to for v in out):
                    raise Broken(rank, "merges an output with an LSE over other keys")
            results = self._union_all(rank, name, inputs[1::2], size)
        elif op.rule is MergeRule.RESCALE:
            results = [
                _rescaled(rank, *(_partial(rank, name, v) for v in values))
                for values in zip(*inputs, strict=True)
            ]
        elif op.rule is MergeRule.SUM and len(inputs) == 1:
            results = inputs[0]  # a copy keeps whatever it is
        else:
            results = self._union_all(rank, name, inputs, size)
            if kind is Kind.OUT:
                check_scaled(rank, results)
        # A softmax merge can only be made in its first pair, into which the others are merged.
        kept = op.inputs[:2] if op.rule is MergeRule.SOFTMAX else op.inputs
        for piece in op.outputs:
            self._memory.write(rank, piece, results, accumulates=piece in kept)

    def _of_nothing(self, rank: int, piece: Piece) -> list[Content]:
        """A program may make up what callers give only for rows that hold no token."""
        labels = self._memory.labels(rank, piece)
        key_side = self._memory.buffer(rank, piece).kind.is_key_side
        side = self._atoms.kv if key_side else self._atoms.q
        if any(side.has_token(atom) for atom, _ in labels):
            raise Broken(rank, f"makes up rows of {piece.buffer} that hold tokens")
        return [DATA] * len(labels)

    def _check_operands(self, rank: int, op: Merge) -> Kind:
        """Check that the operands are those of the rule; returns the kind of the last result."""
        if len(op.outputs) != (2 if op.rule is MergeRule.SOFTMAX else 1):
            raise Broken(rank, f"writes {len(op.outputs)} pieces by the rule {op.rule}")
        self._same_rows(rank, (*op.inputs, *op.outputs))
        kinds = [self._memory.buffer(rank, piece).kind for piece in (*op.inputs, *op.outputs)]
        if kinds != _kinds_of(op, kinds[-1]):
            raise Broken(rank, f"merges {', '.join(kinds)} by the rule {op.rule}")
        if op.rule is MergeRule.LSE and not op.inputs and Kind.LSE not in self._final:
            raise Broken(rank, f"merges nothing by the rule {op.rule}")
        if op.rule is MergeRule.SUM and len(op.inputs) != 1:
            check_summable(rank, kinds[-1])
        return kinds[-1]

    def _union_all(
        self, rank: int, name: str, inputs: Sequence[list[Content]], size: int
    ) -> list[Content]:
        if not inputs:
            return [Partial(0)] * size
        return [
            union(rank, name, [_partial(rank, name, v) for v in values])
            for values in zip(*inputs, strict=True)
        ]

    def _check_calls(self, rank: int, q: Piece, k: Piece, calls: tuple[Call, ...]) -> None:
        q_spans, k_spans = (piece.spans(self._memory.buffer(rank, piece)) for piece in (q, k))
        key = (q_spans, k_spans, calls)
        if key not in self._checked:
            labels = self._memory.labels(rank, q)
            if len(set(labels)) != len(labels):
                raise Broken(rank, f"{q.buffer} holds the same query twice")
            q_atoms = sorted({atom for atom, _ in labels})
            k_atoms = sorted({atom for atom, _ in self._memory.labels(rank, k)})
            visible = int(self._atoms.pairs[q_atoms][:, k_atoms].sum())
            rows = self._q_rows(q_spans), self._k_rows(k_spans)
            self._checked[key] = calls_fault(*rows, calls, visible, self._plan.problem.rows)
        wrong = self._checked[key]
        if wrong:
            raise Broken(rank, wrong)
        self._check_heads(rank, q, k)

    def _check_heads(self, rank: int, q: Piece, k: Piece) -> None:
        """A kernel gives all key heads equally many query heads, in their order: these must be the
        heads that share the key head."""
        q_first, q_stop = q.heads_of(self._memory.buffer(rank, q))
        k_first, k_stop = k.heads_of(self._memory.buffer(rank, k))
        group = self._plan.problem.heads_per_kv_head
        if (q_first, q_stop) == (k_first * group, k_stop * group):
            return
        each, rest = divmod(q_stop - q_first, k_stop - k_first)
        if rest or any(
            (q_first + at) // group != k_first + at // each for at in range(q_stop - q_first)
        ):
            names = f"{q.buffer} and {k.buffer}"
            raise Broken(rank, f"{names} have heads that do not belong to each other")

    def _keys(self, rank: int, k: Piece, v: Piece) -> dict[int, int]:
        """Key atoms of K and V, as bits, for each KV head."""
        self._expect(rank, k, Kind.K)
        self._expect(rank, v, Kind.V)
        self._same_rows(rank, (k, v))
        at = (self._memory.cells(rank, k), k.start, k.stop, k.heads)
        if at not in self._known_keys:
            keys: dict[int, int] = {}
            for atom, head in self._memory.labels(rank, k):
                bit = 1 << atom
                if keys.get(head, 0) & bit:
                    raise Broken(rank, f"{k.buffer} holds the same key twice")
                keys[head] = keys.get(head, 0) | bit
            self._known_keys[at] = keys
        return self._known_keys[at]

    def _expect(self, rank: int, piece: Piece, kind: Kind) -> None:
        buffer, problem = self._memory.buffer(rank, piece), self._plan.problem
        if buffer.kind is not kind:
            raise Broken(rank, f"takes {piece.buffer} for {kind}")
        # Kernels take all tensors in the caller's dtype, and statistics (`structure.py`) in fp32.
        wide = buffer.precision.num_bytes(problem) != problem.element_bytes
        if wide and not kind.is_statistic:
            raise Broken(rank, f"takes {piece.buffer}, which is not in the caller's precision")
        values = self._memory.read(rank, piece)
        if values.count(DATA) != len(values):
            raise Broken(rank, f"takes {piece.buffer} for final, but it is a partial result")

    def _same_rows(self, rank: int, pieces: Sequence[Piece]) -> None:
        first = pieces[0]
        cells, labels = self._memory.cells(rank, first), self._memory.labels(rank, first)
        for piece in pieces[1:]:
            alike = (piece.start, piece.stop, piece.heads) == (first.start, first.stop, first.heads)
            if alike and self._memory.cells(rank, piece) is cells:
                continue
            if self._memory.labels(rank, piece) != labels:
                names = f"{first.buffer} and {piece.buffer}"
                raise Broken(rank, f"{names} hold different tokens or heads")

    def _accumulated(self, rank: int, piece: Piece, fresh: bool, kind: Kind) -> list[Partial]:
        if self._memory.buffer(rank, piece).kind is not kind:
            raise Broken(rank, f"accumulates {kind} in {piece.buffer}")
        if fresh:
            return [Partial(0)] * len(self._memory.labels(rank, piece))
        return [_partial(rank, piece.buffer, v) for v in self._memory.read(rank, piece)]


def union(rank: int, name: str, parts: Sequence[Partial]) -> Partial:
    """The combination of partials over disjoint pairs, rescaled alike or not at all."""
    cover = 0
    for part in parts:
        if part.scaled_to != parts[0].scaled_to:
            raise Broken(rank, f"{name}: combines partial outputs of different scale")
        if cover & part.cover:
            raise Broken(rank, f"{name}: the same pairs are computed twice")
        cover |= part.cover
    return Partial(cover, parts[0].scaled_to)


def _with(rank: int, name: str, before: Partial, added: int) -> Partial:
    """The combination of a partial and newly computed pairs."""
    if before.scaled_to is not None:
        raise Broken(rank, f"{name}: combines partial outputs of different scale")
    if before.cover & added:
        raise Broken(rank, f"{name}: the same pairs are computed twice")
    return Partial(before.cover | added)


def check_scaled(rank: int, values: Sequence[Content]) -> None:
    if any(isinstance(v, Partial) and v.cover and v.scaled_to is None for v in values):
        raise Broken(rank, "adds partial outputs that were not rescaled to the global LSE")


def check_summable(rank: int, kind: Kind) -> None:
    if kind is Kind.LSE:
        raise Broken(rank, "adds LSEs, which combine by log-sum-exp only")


def _partial(rank: int, name: str, value: Content) -> Partial:
    if not isinstance(value, Partial):
        raise Broken(rank, f"{name}: treats input data as a partial result")
    return value


def _rescaled(rank: int, out: Partial, own: Partial, everywhere: Partial) -> Partial:
    if out.cover != own.cover or out.scaled_to is not None:
        raise Broken(rank, "rescales an output by an LSE over other keys")
    if out.cover & ~everywhere.cover:
        raise Broken(rank, "rescales to an LSE that lacks some of the output's own keys")
    return Partial(out.cover, everywhere.cover)


def _kinds_of(op: Merge, result: Kind) -> list[Kind]:
    """The kinds a rule takes and gives."""
    pairs = len(op.inputs) // 2
    match op.rule:
        case MergeRule.SOFTMAX:
            return [Kind.OUT, Kind.LSE] * pairs + [Kind.OUT, Kind.LSE]
        case MergeRule.LSE:
            return [Kind.LSE] * (len(op.inputs) + 1)
        case MergeRule.RESCALE:
            return [Kind.OUT, Kind.LSE, Kind.LSE, Kind.OUT]
        case MergeRule.DELTA:
            return [Kind.OUT, Kind.GRAD_OUT, Kind.DELTA]
        case MergeRule.SUM:
            return [result] * (len(op.inputs) + len(op.outputs))
