"""The options that describe a problem and a plan, shared by all subcommands that make one.

Every default is None here, so that a subcommand can tell what was given: a setting that was not
given is the method's own choice, one that the method lacks is refused by name.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable

from mesh_attention.cli.values import byte_size, count, cuts, one_of, pair, size, window
from mesh_attention.plan.home import Combine
from mesh_attention.plan.layout import LayoutKind
from mesh_attention.plan.methods.key_steps import Gradients
from mesh_attention.plan.methods.mesh import Scheduler
from mesh_attention.plan.methods.startrail import FirstBlock
from mesh_attention.plan.methods.table import DEFAULT_METHOD, METHODS

__all__ = [
    "DEFAULTS",
    "DEFAULT_METHOD",
    "PASSES",
    "add_json_option",
    "add_pass_option",
    "add_plan_options",
    "given",
]

DEFAULTS = {"ranks": 16, "tokens": 65536, "heads": 32, "head_dim": 128}
PASSES = ("forward", "backward", "both")


def add_json_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one line of JSON instead")


def add_pass_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--pass",
        dest="passes",
        metavar="|".join(PASSES),
        type=one_of("pass", PASSES),
        help="which direction (default both)",
    )


def add_plan_options(parser: argparse.ArgumentParser) -> None:
    _add_problem(parser.add_argument_group("problem"))
    _add_setting(parser.add_argument_group("plan"))
    _add_machine(parser.add_argument_group("machine"))


def given(args: argparse.Namespace) -> list[str]:
    """The plan-making options on this command line, as they are written."""
    probe = argparse.ArgumentParser(add_help=False)
    add_plan_options(probe)
    return [
        action.option_strings[0]
        for action in probe._actions
        if getattr(args, action.dest) not in (None, False)
    ]


def _add_problem(group: argparse._ArgumentGroup) -> None:
    def sizes(name: str, help: str) -> None:
        group.add_argument(name, type=size, metavar="N", help=help)

    sizes("--tokens", f"query tokens (default {DEFAULTS['tokens']})")
    sizes("--kv-tokens", "key tokens (default: as many as queries)")
    sizes("--heads", f"query heads (default {DEFAULTS['heads']})")
    sizes("--kv-heads", "key and value heads (default: as many as query heads)")
    sizes("--head-dim", f"size of a query and key head (default {DEFAULTS['head_dim']})")
    sizes("--v-head-dim", "size of a value head (default: as --head-dim)")
    sizes("--element-bytes", "bytes of an element: 2, 4 or 8 (default 2)")
    group.add_argument("--causal", action="store_true", help="a query sees keys up to its own")
    group.add_argument(
        "--window",
        type=window,
        metavar="LEFT[:RIGHT]",
        help="keys around the query; RIGHT is 0 when left out, inf is no limit",
    )
    group.add_argument(
        "--documents", type=cuts, metavar="CUTS", help="packed documents: 0,...,tokens"
    )
    group.add_argument(
        "--kv-documents", type=cuts, metavar="CUTS", help="the same for keys, where they differ"
    )
    group.add_argument(
        "--prefix", type=count, metavar="N", help="first keys that all see (with --causal)"
    )


def _add_setting(group: argparse._ArgumentGroup) -> None:
    tile, chunks = pair("a tile such as 4x2 (AxB)"), pair("a pair such as 4x4 (KQxKKV)")
    heads = pair("a pair such as 2x8 (FIRSTxMOST)")

    def choice(name: str, what: str, names: Iterable[str], help: str) -> None:
        known = tuple(names)
        group.add_argument(name, type=one_of(what, known), metavar="|".join(known), help=help)

    group.add_argument(
        "--method", metavar="NAME", help=f"{', '.join(METHODS)} (default {DEFAULT_METHOD})"
    )
    group.add_argument(
        "--ranks",
        type=size,
        metavar="N",
        help=f"number of ranks (default {DEFAULTS['ranks']}, or A*B of --tile)",
    )
    group.add_argument(
        "--tile", type=tile, metavar="AxB", help="Q by KV partitions of a rank (default: cheapest)"
    )
    group.add_argument("--backward-tile", type=tile, metavar="AxB", help="default: as --tile")
    group.add_argument(
        "--no-rotation",
        dest="rotation",
        action="store_const",
        const=False,
        help="contiguous KV partitions in a tile, as before KV rotation",
    )
    group.add_argument(
        "--chunks", type=chunks, metavar="KQxKKV", help="chunks that overlap (default 1x1)"
    )
    group.add_argument("--backward-chunks", type=chunks, metavar="KQxKKV", help="default: the same")
    group.add_argument(
        "--heads-at-once",
        type=heads,
        metavar="FIRSTxMOST",
        help="KV heads of the first and of the largest slice (default: all at once)",
    )
    group.add_argument(
        "--backward-heads-at-once", type=heads, metavar="FIRSTxMOST", help="default: the same"
    )
    group.add_argument(
        "--auto-cut",
        action="store_const",
        const=True,
        help="choose chunks and heads at once by size, as ContextParallel does",
    )
    choice("--layout", "layout", LayoutKind, "who owns which token (default: by the mask)")
    group.add_argument("--stripe-block", type=size, metavar="N", help="tokens of a stripe")
    choice("--combine", "way to combine", Combine, "how partial results come home (default auto)")
    group.add_argument(
        "--gather-out",
        action="store_const",
        const=True,
        help="backward gathers O, as the paper does, instead of delta",
    )
    group.add_argument("--ulysses", type=size, metavar="U", help="ranks that swap tokens for heads")
    group.add_argument("--team", type=size, metavar="C", help="team size; its square divides ranks")
    group.add_argument("--inner", type=size, metavar="N", help="ranks of an inner ring")
    choice("--gradients", "way home", Gradients, "how dK and dV of a wandering block come home")
    choice("--first-block", "first block", FirstBlock, "with which team's block a member begins")
    choice("--scheduler", "scheduler", Scheduler, "order of the tasks (default greedy)")
    group.add_argument(
        "--max-memory",
        type=byte_size,
        metavar="BYTES",
        help="most workspace of a pass, such as 512MiB or 2GiB",
    )


def _add_machine(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--ranks-per-node", type=size, metavar="N", help="default: one node, or the cluster's"
    )
    group.add_argument(
        "--alpha", type=size, metavar="N", help="a node is an N-wide patch of the grid of tiles"
    )
