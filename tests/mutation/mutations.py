"""Which mutants there are, and a random sample of them, for `run.py`.

Cosmic Ray makes them: another operator, a number one higher or lower, a condition negated, a
decorator left out, ... A place in the code is drawn, then one of the mutants at that place.

Changes that no test could or should see are not drawn: annotations, `if TYPE_CHECKING`, assertions
and `zip(strict=True)` (which hold by themselves in a right program), `slots=True`.
"""

from __future__ import annotations

import ast
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mutation.touched import PACKAGE


@dataclass(frozen=True, slots=True)
class Mutant:
    """`occurrence` counts the places in the file where the operator can change something."""

    file: str
    line: int
    column: int
    operator: str
    occurrence: int

    @property
    def folder(self) -> str:
        return Path(self.file).relative_to(PACKAGE).parts[0]

    def apply(self, source: str) -> str | None:
        from cosmic_ray.mutating import mutate_code
        from cosmic_ray.plugins import get_operator

        changed: str | None = mutate_code(source, get_operator(self.operator)(), self.occurrence)
        return changed


def sample(tree: Path, files: list[str], seed: int, count: int, only: str) -> list[Mutant]:
    """A random order of places, a random mutant at each: any first part of it is a sample too."""
    places: dict[tuple[str, int, int], list[Mutant]] = {}
    for name in files:
        if only in name:
            for mutant in mutants_of(name, (tree / name).read_text()):
                places.setdefault((mutant.file, mutant.line, mutant.column), []).append(mutant)
    choose = random.Random(seed)
    drawn: list[Mutant] = []
    for place in choose.sample(sorted(places), len(places)):
        mutant = choose.choice(places[place])
        if len(drawn) == count:
            break
        if _compiles(mutant.apply((tree / mutant.file).read_text())):
            drawn.append(mutant)
    return drawn


def _compiles(source: str | None) -> bool:
    try:
        compile(source or "(", "mutant", "exec")
    except SyntaxError:
        return False
    return True


def mutants_of(name: str, source: str) -> Iterator[Mutant]:
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.plugins import get_operator, operator_names

    left_out = list(unseen(ast.parse(source)))
    # Leaves that no operator changes are most of a file.
    nodes = [
        node
        for node in ast_nodes(get_ast(source))
        if node.type not in ("name", "newline", "string", "endmarker")
        and getattr(node, "value", "+") not in "()[]{},:.=;->"
    ]
    for operator in sorted(operator_names()):
        if operator.split("/")[-1].startswith("Variable"):  # these need the name of a variable
            continue
        changes = get_operator(operator)()
        positions = [at for node in nodes for at, _ in changes.mutation_positions(node)]
        for occurrence, (line, column) in enumerate(positions):
            if not any(start <= (line, column) < stop for start, stop in left_out):
                yield Mutant(name, line, column, operator, occurrence)


def unseen(module: ast.Module) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Ranges of (line, column) in which nothing is drawn."""
    for node in ast.walk(module):
        hidden: ast.AST | None = None
        match node:
            case ast.Assert():
                hidden = node
            case ast.arg() | ast.AnnAssign():
                hidden = node.annotation
            case ast.FunctionDef():
                hidden = node.returns
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                hidden = node.test
            case ast.keyword(arg="slots" | "strict"):
                hidden = node.value
        if isinstance(hidden, ast.expr | ast.stmt):
            stop = (hidden.end_lineno or hidden.lineno, hidden.end_col_offset or 0)
            yield (hidden.lineno, hidden.col_offset), stop
