"""The verifier: runs all ranks side by side on symbolic memory.

Proven, for each pass: every unmasked (query, key) pair is computed exactly once and combined at its
owner exactly once; nothing is used before it arrives or after it is freed; all members of a group
meet in the same operations in the same order; and no rank deadlocks.

Ranks are run one operation at a time and block in every communication until all its members are
there. Real runs only have fewer constraints (communication overlaps computation), so a plan that
finishes here cannot deadlock there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from mesh_attention.plan.language.buffers import Kind
from mesh_attention.plan.language.plan import Pass, Plan, a_plan
from mesh_attention.plan.language.program import (
    Attend,
    AttendBackward,
    Communication,
    Free,
    Merge,
    Operation,
    Task,
)
from mesh_attention.plan.read.verify.atoms import Atoms
from mesh_attention.plan.read.verify.communicate import communicate
from mesh_attention.plan.read.verify.compute import SymbolicCompute
from mesh_attention.plan.read.verify.memory import DATA, Broken, Content, Memory, Partial
from mesh_attention.plan.read.verify.structure import Finding, structure_findings

Progress = Callable[[int, int], None]
_MOST_FINDINGS = 20


def verify(plan: Plan, *, progress: Progress | None = None) -> list[Finding]:
    """Everything that is wrong with a plan; an empty list proves it. `progress(done, all)` gets
    numbers of operations."""
    total = sum(len(p.operations) for pass_ in a_plan(plan).passes for p in pass_.programs)
    done = 0
    findings: list[Finding] = []
    for pass_ in plan.passes:
        malformed = structure_findings(plan, pass_)
        if malformed:
            findings += malformed
            continue
        machine = _Machine(plan, pass_)
        for _ in machine.run():
            done += 1
            if progress and done % 512 == 0:
                progress(done, total)
        findings += machine.findings
    if progress:
        progress(total, total)
    return findings


class _Machine:
    """Runs all programs of one pass, and keeps what is wrong in `findings`."""

    def __init__(self, plan: Plan, pass_: Pass) -> None:
        self.plan = plan
        self.pass_ = pass_
        self.findings: list[Finding] = []
        self.atoms = Atoms(plan, pass_)
        self.head_bits = {h: self.atoms.head_bits(h) for h in set(self.atoms.kv_head_of)}
        self.memory = Memory(plan.problem, pass_, self.atoms)
        self.compute = SymbolicCompute(plan, pass_, self.atoms, self.memory)

    def run(self) -> Iterator[None]:
        """Yields once for every operation done; stops at the first that breaks."""
        programs = self.pass_.programs
        at = [0] * len(programs)
        arrived: dict[tuple[type, Task, str], set[int]] = {}
        runnable = list(range(len(programs)))
        try:
            while runnable:
                rank = runnable.pop()
                operations = programs[rank].operations
                while at[rank] < len(operations):
                    op = operations[at[rank]]
                    if isinstance(op, Communication):
                        here = arrived.setdefault((type(op), op.task, op.group), set())
                        here.add(rank)
                        members = self.pass_.groups[op.group]
                        if len(here) < len(members):
                            break
                        meeting = [programs[m].operations[at[m]] for m in members]
                        communicate(self.memory, members, meeting)
                        here.clear()
                        for member in members:
                            at[member] += 1
                            yield
                        runnable += [member for member in members if member != rank]
                        continue
                    self._compute(rank, op)
                    at[rank] += 1
                    yield
        except Broken as broken:
            # `at` points at the operation each rank is in.
            self._report(broken.rank, at, broken.message)
            return
        if not self._report_waiting(at):
            self._check_ends(at)

    def _compute(self, rank: int, op: Operation) -> None:
        match op:
            case Attend():
                self.compute.attend(rank, op)
            case AttendBackward():
                self.compute.attend_backward(rank, op)
            case Merge():
                self.compute.merge(rank, op)
            case Free():
                for name in op.buffers:
                    self.memory.free(rank, name)
            case _:
                raise AssertionError(op)

    def _report(self, rank: int, at: list[int], message: str) -> None:
        operations = self.pass_.programs[rank].operations
        name = operations[at[rank]].name if at[rank] < len(operations) else "end"
        if len(self.findings) < _MOST_FINDINGS:
            self.findings.append(Finding(str(self.pass_.direction), rank, name, message))

    def _report_waiting(self, at: list[int]) -> bool:
        """Ranks that never finished: what each waits for, and where the missing ones are."""
        programs = self.pass_.programs
        waiting = {
            rank: programs[rank].operations[at[rank]]
            for rank in range(len(programs))
            if at[rank] < len(programs[rank].operations)
        }
        # First the ranks whose order of collectives few others have: one of them is at fault.
        ways = [
            tuple(op.task for op in program.operations if isinstance(op, Communication))
            for program in programs
        ]
        common = Counter(ways)
        for rank in sorted(waiting, key=lambda rank: common[ways[rank]]):
            op = waiting[rank]
            assert isinstance(op, Communication)
            absent = []
            for member in self.pass_.groups[op.group]:
                there = waiting.get(member)
                same = there is not None and (type(there), there.task) == (type(op), op.task)
                if not same:
                    absent.append(f"rank {member} is at {there.name if there else 'its end'}")
            self._report(rank, at, "deadlocks: " + ", ".join(absent[:4]))
        return bool(waiting)

    def _check_ends(self, at: list[int]) -> None:
        for rank in range(len(self.pass_.programs)):
            for name in self.memory.leaks(rank):
                self._report(rank, at, f"never frees {name}")
            for buffer, (atom, head), value in self.memory.outputs(rank):
                wrong = self._wrong_end(buffer.kind, atom, head, value)
                if wrong:
                    cuts = (self.atoms.kv if buffer.kind.is_key_side else self.atoms.q).cuts
                    places = f"places {cuts[atom]}:{cuts[atom + 1]}"
                    self._report(rank, at, f"{buffer.name}, {places}: {wrong}")
                    break

    def _wrong_end(self, kind: Kind, atom: int, head: int, value: Content | None) -> str | None:
        if value is None:
            return "is never written"
        if kind in (Kind.Q, Kind.K, Kind.V):
            return None if value is DATA else "is kept and holds something else"
        if not isinstance(value, Partial):
            return "holds something else"
        if kind.is_key_side:
            required = self.atoms.required_by_key[atom] & self.head_bits[head]
        else:
            required = self.atoms.required[atom]
        if value.cover != required:
            missing = (required & ~value.cover).bit_count()
            return f"{missing} of {required.bit_count()} pieces of its pairs are missing"
        if value.scaled_to is not None and value.scaled_to != value.cover:
            return "is scaled to another softmax than its own"
        return None
