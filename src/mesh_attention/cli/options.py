"""The flags that describe a question, and the question that a command line asks.

Flags of a plan are made from the options of the methods; those of a problem stand here. Each keeps
its value under the name that Python has for it, so that errors of the planner can be told in flags.
What was not given is None and left out: defaults are the planner's, but for sizes of a problem.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from dataclasses import fields
from enum import StrEnum
from typing import Any, get_origin

from mesh_attention.cli.command import UsageError
from mesh_attention.cli.values import byte_size, count, fraction, one_of, pair, size, starts, window
from mesh_attention.plan.build.setting import Option
from mesh_attention.plan.mask import Mask
from mesh_attention.plan.methods.table import DEFAULT_METHOD, METHODS, all_options
from mesh_attention.plan.plan import Direction, Plan
from mesh_attention.plan.problem import Problem
from mesh_attention.plan.question import Question, ask

DEFAULT_RANKS = 16
DEFAULT_SIZES = {"q_tokens": 65536, "num_heads": 32, "head_dim": 128}
MOST_RANKS = 1 << 16  # the programs of more would not fit into memory
PASSES = ("forward", "backward", "both")

_PROBLEM: tuple[tuple[str, str, Callable[[str], Any] | None, str, str], ...] = (
    ("--tokens", "q_tokens", size, "N", "query tokens"),
    ("--kv-tokens", "kv_tokens", size, "N", "key tokens (default: as many as queries)"),
    ("--heads", "num_heads", size, "N", "query heads"),
    ("--kv-heads", "num_kv_heads", size, "N", "key and value heads (default: as --heads)"),
    ("--head-dim", "head_dim", size, "N", "size of a query and key head"),
    ("--v-head-dim", "v_head_dim", size, "N", "size of a value head (default: as --head-dim)"),
    ("--element-bytes", "element_bytes", size, "N", "bytes of an element: 2, 4 or 8 (default 2)"),
    ("--causal", "causal", None, "", "a query sees keys up to its own"),
    (
        *("--window", "window", window, "LEFT[:RIGHT]"),
        "keys around the query; RIGHT is 0 when left out, inf is no limit",
    ),
    ("--documents", "documents", starts, "STARTS", "packed documents: 0,...,tokens"),
    ("--kv-documents", "kv_documents", starts, "STARTS", "the same for keys, where they differ"),
    ("--prefix", "prefix", count, "N", "first keys that all see (with --causal)"),
)


def add_json_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one line of JSON instead")


def add_pass_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--pass",
        dest="passes",
        metavar="|".join(PASSES),
        type=one_of("pass", PASSES),
        help="which direction (default both)",
    )


def add_question_flags(parser: argparse.ArgumentParser) -> None:
    problem = parser.add_argument_group("problem")
    for flag, name, reader, metavar, help in _PROBLEM:
        if reader is None:
            problem.add_argument(flag, dest=name, action="store_true", default=None, help=help)
            continue
        usual = DEFAULT_SIZES.get(name)
        help = f"{help} (default {usual})" if usual else help
        problem.add_argument(flag, dest=name, type=reader, metavar=metavar, help=help)
    plan = parser.add_argument_group("plan")
    plan.add_argument(
        "--method", metavar="NAME", help=f"{', '.join(METHODS)} (default {DEFAULT_METHOD})"
    )
    plan.add_argument(
        "--ranks",
        type=size,
        metavar="N",
        help=f"number of ranks (default {DEFAULT_RANKS}, or A*B of --tile)",
    )
    groups = {tuple(METHODS): plan}
    for option, methods in all_options().values():
        if methods not in groups:
            groups[methods] = parser.add_argument_group(f"options of {', '.join(methods)}")
        _add_option(groups[methods], option)


def _add_option(group: argparse._ArgumentGroup, option: Option) -> None:
    flag, default = f"--{option.name.replace('_', '-')}", option.default
    if option.type is bool:
        usual = f" (default {'yes' if default else 'no'})"
        action = argparse.BooleanOptionalAction
        group.add_argument(flag, dest=option.name, action=action, help=option.help + usual)
        return
    usual = "" if default is None else f" (default {default})"
    is_enum = isinstance(option.type, type) and issubclass(option.type, StrEnum)
    reader: Callable[[str], Any]
    if is_enum:
        reader = one_of(option.name.replace("_", " "), option.type)
    elif get_origin(option.type) is tuple:
        example = re.sub("[A-Z]+", "2", option.metavar)
        reader = pair(f"a pair such as {example} ({option.metavar})")
    elif option.type in (int, float):
        amount = byte_size if option.name.endswith("_bytes") else size
        reader = amount if option.type is int else fraction
    else:
        return  # its value has no text, as that of `costs`
    metavar = "|".join(option.type) if is_enum else option.metavar
    group.add_argument(
        flag, dest=option.name, type=reader, metavar=metavar, help=option.help + usual
    )


def given(args: argparse.Namespace) -> list[str]:
    """The flags of a question on this command line, as they are written."""
    probe = argparse.ArgumentParser(add_help=False)
    add_question_flags(probe)
    flags = [(action.option_strings, getattr(args, action.dest)) for action in probe._actions]
    return [names[-1 if value is False else 0] for names, value in flags if value is not None]


def question_of(args: argparse.Namespace) -> Question:
    method = {} if args.method is None else {"method": args.method}
    directions = directions_of(args)
    return ask(
        problem_of(args), ranks_of(args), directions=directions, **method, **options_of(args)
    )


def plan_of(args: argparse.Namespace) -> Plan:
    return question_of(args).plan()


def options_of(args: argparse.Namespace) -> dict[str, Any]:
    """The options that were given, by their names in Python."""
    return _given(args, *all_options())


def directions_of(args: argparse.Namespace) -> tuple[Direction, ...]:
    return tuple(Direction) if args.passes in (None, "both") else (Direction(args.passes),)


def ranks_of(args: argparse.Namespace) -> int:
    ranks: int | None = args.ranks
    if ranks is None:
        ranks = args.tile[0] * args.tile[1] if args.tile else DEFAULT_RANKS
    if ranks > MOST_RANKS:
        raise UsageError(f"--ranks {ranks} is more than a plan can hold; at most {MOST_RANKS}")
    return ranks


def problem_of(args: argparse.Namespace) -> Problem:
    mask = _given(args, *(field.name for field in fields(Mask)))
    if "window" in mask and mask["window"][1] == 0:
        mask["causal"] = True
    sizes = _given(args, *(field.name for field in fields(Problem) if field.name != "mask"))
    return Problem(**{**DEFAULT_SIZES, **sizes}, mask=Mask(**mask))


def _given(args: argparse.Namespace, *names: str) -> dict[str, Any]:
    found = {name: getattr(args, name, None) for name in names}
    return {name: value for name, value in found.items() if value is not None}
