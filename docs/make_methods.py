"""Writes the generated parts of docs/methods.md and docs/options.md from the table of methods.

    python docs/make_methods.py            rewrite the files
    python docs/make_methods.py --check    only say whether they are up to date

What can be found out is found out: which numbers of ranks a method takes, and that it runs causal,
GQA, uneven lengths and each layout, which means that `verify` proves such plans. Options and their
words come from the settings of the methods. Only the volumes are said here; tests evaluate them
against `count`.
"""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

from mesh_attention.choose.ask import make_plan
from mesh_attention.errors import PlanError
from mesh_attention.plan.methods.table import METHODS, Method, all_options
from mesh_attention.plan.problem.layout import LayoutKind
from mesh_attention.plan.problem.mask import Mask
from mesh_attention.plan.problem.problem import Problem
from mesh_attention.plan.read.count import count
from mesh_attention.plan.read.verify import verify

FOLDER = Path(__file__).parent
BEGIN = "<!-- Made by docs/make_methods.py from the table of methods; edit that instead. -->"
END = "<!-- End of the made part. -->"

# Volume a rank, forward and backward, under MHA and a full mask, in units of N*d elements,
# statistics left out; other masks change it only where what is not seen stays.
# n ranks, a x b the tile, U the Ulysses degree, C the team. tests/methods evaluates them.
VOLUMES = {
    "mesh": ("(2*a + 2*b - 4)/n", "(3*(a-1) + 4*(b-1))/n"),
    "ring": ("2 - 2/n", "4 - 4/n"),
    "ring-q": ("2 - 2/n", "3 - 3/n"),
    "double-ring": ("4*(U-1)/(U*n) + 2*(n/U - 1)/n", "4*(U-1)/(U*n) + 4*(n/U - 1)/n"),
    "allgather-kv": ("2 - 2/n", "4 - 4/n"),
    "ulysses": ("4*(n-1)/n**2", "4*(n-1)/n**2"),
    "usp": ("4*(U-1)/(U*n) + 2*(n/U - 1)/n", "4*(U-1)/(U*n) + 4*(n/U - 1)/n"),
    "startrail": ("(4*C - 4)/n + 2/C", "(7*C - 7)/n + 4/C"),
    "mesh-usp": (
        "4*(U-1)/(U*n) + (2*a + 2*b - 4)/n",
        "4*(U-1)/(U*n) + (3*(a-1) + 4*(b-1))/n",
    ),
    "agq-ringkv": ("(2*a + 2*b - 4)/n", "(3*(a-1) + 4*(b-1))/n"),
    "agkv-ringqo": ("(2*a + 2*b - 4)/n", "(3*(a-1) + 4*(b-1))/n"),
    "seen": ("(2*a + 2*b - 4)/n", "(3*(a-1) + 4*(b-1))/n"),
}

PROBE_RANKS, PROBE_HEADS = 4, 8
UP_TO = 64


def main(arguments: list[str]) -> int:
    old = {name: (FOLDER / name).read_text() for name in parts()}
    new = {name: with_part(old[name], part) for name, part in parts().items()}
    if "--check" in arguments:
        print("up to date" if new == old else "out of date: python docs/make_methods.py")
        return int(new != old)
    for name, page in new.items():
        (FOLDER / name).write_text(page)
    return 0


def with_part(page: str, text: str) -> str:
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{text}\n\n{END}{after}"


def parts() -> dict[str, str]:
    """By the name of the page: the tables of it that are made."""
    methods = METHODS.values()
    of_methods = (
        (
            ["method", "what it does", "moves tokens by", "ranks"],
            [[f"`{m.name}`", m.summary, moved_by(m), ranks_taken(m)] for m in methods],
        ),
        (
            ["method", "volume forward", "volume backward"],
            [[f"`{m.name}`", *map(formula, VOLUMES[m.name])] for m in methods],
        ),
    )
    return {
        "methods.md": "\n\n".join((*(table(*rows) for rows in of_methods), supported_by_all())),
        "options.md": table(["option", "what it says", "methods"], option_rows()),
    }


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def formula(text: str) -> str:
    return f"`{text.replace('**', '^').replace('*', '')}`"


def problem(heads: int = PROBE_HEADS, *, uneven: bool = False, gqa: bool = False) -> Problem:
    tokens = 8 * PROBE_RANKS + (3 if uneven else 0)
    return Problem(tokens, heads, head_dim=4, num_kv_heads=2 if gqa else None)


def ranks_taken(method: Method) -> str:
    taken = [n for n in range(1, UP_TO + 1) if takes(method, n)]
    if len(taken) == UP_TO:
        return "any"
    numbers = ", ".join(map(str, taken))
    if taken == [*range(1, len(taken) + 1)]:
        numbers = f"1 to {len(taken)}"
    return f"{numbers} with {PROBE_HEADS} heads"


def takes(method: Method, ranks: int) -> bool:
    try:
        make_plan(problem(), ranks, method=method.name, directions=())
    except PlanError:
        return False
    return True


def moved_by(method: Method) -> str:
    """The kinds of operation of both passes in every candidate, on one node and on two."""
    kinds: set[str] = set()
    for per_node in (None, 2):
        for setting in method.candidates(problem(), PROBE_RANKS, per_node):
            options = setting | {"ranks_per_node": per_node}
            counts = count(make_plan(problem(), PROBE_RANKS, method=method.name, **options))
            kinds |= {
                kind
                for traffic in counts.values()
                for r in traffic.ranks
                for kind in r.by_operation
            }
    words = {
        "AllGather": "all-gather",
        "ReduceScatter": "reduce-scatter",
        "AllToAll": "all-to-all",
        "SendRecv": "point-to-point",
    }
    return ", ".join(word for kind, word in words.items() if kind in kinds)


def supported_by_all() -> str:
    causal, methods = Mask(causal=True), METHODS.values()
    cases = {
        "causal masks": (problem(), causal),
        "GQA": (problem(gqa=True), Mask()),
        "uneven lengths": (problem(uneven=True), Mask()),
    }
    words = [word for word, case in cases.items() if all(proven(m, *case) for m in methods)]
    layouts = [
        kind
        for kind in LayoutKind
        if all(proven(m, problem(), causal, **_layout(kind)) for m in methods)
    ]
    return (
        f"Every method has {', '.join(words)} and the layouts {', '.join(layouts)}: `verify` "
        "proves such plans, forward and backward."
    )


def proven(method: Method, sized: Problem, mask: Mask, **options: Any) -> bool:
    masked = Problem(
        sized.q_tokens, sized.num_heads, sized.head_dim, num_kv_heads=sized.kv_heads, mask=mask
    )
    return not verify(make_plan(masked, PROBE_RANKS, method=method.name, **options))


def _layout(kind: LayoutKind) -> dict[str, Any]:
    """A listed one has every rank's tokens in pieces, and in no order."""
    if kind is not LayoutKind.LISTED:
        return {"layout": kind}
    cuts = range(0, problem().q_tokens + 1, problem().q_tokens // (2 * PROBE_RANKS))
    pieces = list(pairwise(cuts))
    owned = tuple((pieces[g + PROBE_RANKS], pieces[g]) for g in range(PROBE_RANKS))
    return {"layout": kind, "stretches": owned}


def option_rows() -> list[list[str]]:
    return [
        [f"`{name}`", option.help, _users(methods)]
        for name, (option, methods) in all_options().items()
    ]


def _users(methods: tuple[str, ...]) -> str:
    return "all" if len(methods) == len(METHODS) else ", ".join(f"`{name}`" for name in methods)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
