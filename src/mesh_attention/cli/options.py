"""The options that describe a problem and a plan, shared by all subcommands that make one.

Every default is None here, so that a subcommand can tell what was given: a setting that was not
given is the method's own choice, one that the method lacks is refused by name.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from enum import StrEnum
from typing import get_origin

from mesh_attention.cli.values import byte_size, count, cuts, fraction, one_of, pair, size, window
from mesh_attention.plan.build.setting import Option
from mesh_attention.plan.methods.table import DEFAULT_METHOD, METHODS, all_options

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
    """One flag for every option of every method, made from its setting."""
    group.add_argument(
        "--method", metavar="NAME", help=f"{', '.join(METHODS)} (default {DEFAULT_METHOD})"
    )
    group.add_argument(
        "--ranks",
        type=size,
        metavar="N",
        help=f"number of ranks (default {DEFAULTS['ranks']}, or A*B of --tile)",
    )
    for option, methods in all_options().values():
        reader = _reader(option)
        some = f" ({', '.join(methods)})" if len(methods) < len(METHODS) else ""
        help = f"{option.help}{some}".replace("`", "")
        if option.type is bool:
            flag = f"--{'no-' if option.default else ''}{option.name}".replace("_", "-")
            value = not option.default
            group.add_argument(flag, dest=option.name, action="store_const", const=value, help=help)
        elif reader is not None:
            flag = f"--{option.name}".replace("_", "-")
            group.add_argument(flag, type=reader, metavar=option.metavar, help=help)


def _reader(option: Option) -> Callable[[str], object] | None:
    """How the text of its value is read; None for what has no text."""
    if get_origin(option.type) is tuple:
        example = option.metavar.replace("FIRST", "2").replace("MOST", "8")
        example = re.sub("[A-Z]+", "2", example)
        return pair(f"a pair such as {example} ({option.metavar})")
    if option.name.endswith("_bytes"):
        return byte_size
    if option.type is int:
        return size
    if option.type is float:
        return fraction
    if issubclass(option.type, StrEnum):
        return one_of(option.name.replace("_", " "), option.type)
    return None
