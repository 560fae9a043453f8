"""The flags that describe a question, and the question that a command line asks.

Flags of a plan are made from the options of the methods; those of a problem stand here. Each keeps
its value under the name that Python has for it, so that errors of the planner can be told in flags.
What was not given is None and left out: defaults are the planner's, but for sizes of a problem.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from dataclasses import fields
from enum import StrEnum
from typing import Any, get_origin

from mesh_attention.choose.ask import ask
from mesh_attention.cli.command import Flag, UsageError
from mesh_attention.cli.values import (
    byte_size,
    count,
    fraction,
    json_file,
    one_of,
    pair,
    size,
    starts,
    window,
)
from mesh_attention.plan.language.plan import Direction, Plan
from mesh_attention.plan.methods.parts.setting import Option
from mesh_attention.plan.methods.question import Question
from mesh_attention.plan.methods.table import AUTO, METHODS, all_options
from mesh_attention.plan.problem.mask import Mask
from mesh_attention.plan.problem.problem import Problem

DEFAULT_RANKS = 16
DEFAULT_SIZES = {"q_tokens": 65536, "num_heads": 32, "head_dim": 128}
MOST_RANKS = 1 << 16  # the programs of more would not fit into memory
PASSES = ("forward", "backward", "both")

_PROBLEM = (
    Flag("--tokens", "query tokens", size, "N", to="q_tokens"),
    Flag("--kv-tokens", "key tokens (default: as many as queries)", size, "N"),
    Flag("--heads", "query heads", size, "N", to="num_heads"),
    Flag("--kv-heads", "key and value heads (default: as --heads)", size, "N", to="num_kv_heads"),
    Flag("--head-dim", "size of a query and key head", size, "N"),
    Flag("--v-head-dim", "size of a value head (default: as --head-dim)", size, "N"),
    Flag("--element-bytes", "bytes of an element: 2, 4 or 8 (default 2)", size, "N"),
    Flag("--causal", "a query sees keys up to its own (default no)", both=True),
    Flag(
        "--window",
        "keys around the query; RIGHT is 0 when left out, inf is no limit",
        *(window, "LEFT[:RIGHT]"),
    ),
    Flag("--documents", "packed documents: 0,...,tokens", starts, "STARTS"),
    Flag("--kv-documents", "the same for keys, where they differ", starts, "STARTS"),
    Flag("--prefix", "first keys that all see (with --causal)", count, "N"),
    Flag(
        "--slices",
        'in place of these: JSON, [[[query start, stop], [key start, stop], "causal"], ...]',
        *(json_file, "FILE"),
    ),
)
_PASS = Flag(
    "--pass",
    "which direction (default both)",
    *(one_of("pass", PASSES), "|".join(PASSES)),
    to="passes",
)


def add_plan_flags(parser: argparse.ArgumentParser) -> None:
    """Which passes, of the plan that answers which question."""
    _PASS.add_to(parser)
    add_question_flags(parser)


def add_question_flags(parser: argparse.ArgumentParser) -> None:
    problem = parser.add_argument_group("problem")
    for flag in _PROBLEM:
        usual = DEFAULT_SIZES.get(flag.to or flag.name[2:].replace("-", "_"))
        help = f"{flag.help} (default {usual})" if usual else flag.help
        flag._replace(help=help).add_to(problem)
    plan = parser.add_argument_group("plan")
    methods_text = f"{', '.join(METHODS)}; or {AUTO} (default): chosen by a search"
    Flag("--method", methods_text, str, "NAME").add_to(plan)
    ranks_text = f"number of ranks (default {DEFAULT_RANKS}, or A*B of --tile)"
    Flag("--ranks", ranks_text, size, "N").add_to(plan)
    groups = {tuple(METHODS): plan}
    for option, methods in all_options().values():
        if methods not in groups:
            groups[methods] = parser.add_argument_group(f"options of {', '.join(methods)}")
        _add_option(groups[methods], option)


def _add_option(group: argparse._ArgumentGroup, option: Option) -> None:
    if not option.has_text:
        return  # as `costs`, which only Python code can give
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
    else:
        amount = byte_size if option.name.endswith("_bytes") else size
        reader = amount if option.type is int else fraction
    metavar = "|".join(option.type) if is_enum else option.metavar
    Flag(flag, option.help + usual, reader, metavar).add_to(group)


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
    plan = question_of(args).plan()
    tell_fewer_chunks(args, plan)
    return plan


def tell_fewer_chunks(args: argparse.Namespace, plan: Plan) -> None:
    """A rank with fewer rows than chunks were asked for has fewer: not without a word."""
    for one in plan.passes:
        name = "backward_chunks" if one.direction is Direction.BACKWARD else "chunks"
        name = name if getattr(args, name) else "chunks"
        asked, made = getattr(args, name), one.setting.get("chunks")
        if asked is not None and made not in (None, f"{asked[0]}x{asked[1]}"):
            flag = f"--{name.replace('_', '-')} {asked[0]}x{asked[1]}"
            print(
                f"note: {flag} became {made} in the {one.direction} pass, "
                "as a rank has no more rows",
                file=sys.stderr,
            )


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
        mask.setdefault("causal", True)
    sizes = _given(args, *(field.name for field in fields(Problem) if field.name != "mask"))
    return Problem(**{**DEFAULT_SIZES, **sizes}, mask=Mask(**mask))


def _given(args: argparse.Namespace, *names: str) -> dict[str, Any]:
    found = {name: getattr(args, name, None) for name in names}
    return {name: value for name, value in found.items() if value is not None}
