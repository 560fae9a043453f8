"""From a command line to a plan: the one place where options become a `Problem` and settings."""

from __future__ import annotations

import argparse
import re
from typing import Any

from mesh_attention.cli.command import UsageError
from mesh_attention.cli.options import DEFAULTS
from mesh_attention.plan.mask import Mask
from mesh_attention.plan.methods.table import DEFAULT_METHOD, all_options
from mesh_attention.plan.plan import Direction, Plan
from mesh_attention.plan.problem import Problem
from mesh_attention.plan.question import make_plan

MOST_RANKS = 1 << 16  # the programs of more would not fit into memory
MOST_TOKENS = 1 << 30  # the pairs of more could not be counted in 64 bits

# Names in errors of the planner, as a person at the command line knows them.
_FLAGS = {
    "q_tokens": "--tokens",
    "kv_tokens": "--kv-tokens",
    "num_heads": "--heads",
    "num_kv_heads": "--kv-heads",
    "head_dim": "--head-dim",
    "v_head_dim": "--v-head-dim",
    "element_bytes": "--element-bytes",
    "kv_documents": "--kv-documents",
    "block": "--stripe-block",
    "ranks": "--ranks",
    "rank": "--rank",
    "sms": "--sms",
    "prefix": "--prefix",
    "window": "--window",
    "documents": "--documents",
} | {name: f"--{name.replace('_', '-')}" for name in all_options()}


def ranks_of(args: argparse.Namespace) -> int:
    ranks: int | None = args.ranks
    if ranks is None:
        ranks = args.tile[0] * args.tile[1] if args.tile else DEFAULTS["ranks"]
    _refuse_above("--ranks", ranks, MOST_RANKS)
    return ranks


def settings_of(args: argparse.Namespace) -> dict[str, Any]:
    """The settings that were given, by the names that methods have for them."""
    given = {name: getattr(args, name, None) for name in all_options()}
    return {name: value for name, value in given.items() if value is not None}


def plan_of(args: argparse.Namespace) -> Plan:
    options = settings_of(args)
    try:
        return make_plan(
            problem_of(args),
            ranks_of(args),
            method=args.method or DEFAULT_METHOD,
            directions=directions_of(args.passes),
            **options,
        )
    except (ValueError, OverflowError) as error:
        raise UsageError(with_flags(str(error))) from error


def directions_of(passes: str | None) -> tuple[Direction, ...]:
    return tuple(Direction) if passes in (None, "both") else (Direction(passes),)


def _refuse_above(flag: str, value: int | None, most: int) -> None:
    if value is not None and value > most:
        raise UsageError(f"{flag} {value} is more than a plan can hold; at most {most}")


def problem_of(args: argparse.Namespace) -> Problem:
    def size(name: str) -> Any:
        value = getattr(args, name)
        return DEFAULTS[name] if value is None else value

    _refuse_above("--tokens", args.tokens, MOST_TOKENS)
    _refuse_above("--kv-tokens", args.kv_tokens, MOST_TOKENS)
    causal_window = args.window is not None and args.window[1] == 0
    return Problem(
        q_tokens=size("tokens"),
        num_heads=size("heads"),
        head_dim=size("head_dim"),
        kv_tokens=args.kv_tokens,
        num_kv_heads=args.kv_heads,
        v_head_dim=args.v_head_dim,
        element_bytes=args.element_bytes or 2,
        mask=Mask(
            causal=args.causal or causal_window,
            window=args.window,
            prefix=args.prefix or 0,
            documents=args.documents,
            kv_documents=args.kv_documents,
        ),
    )


def with_flags(message: str) -> str:
    """
    >>> with_flags("num_heads=7 is not a multiple of num_kv_heads=2")
    '--heads 7 is not a multiple of --kv-heads 2'
    """
    message = message.replace("causal=True", "--causal")
    for name, flag in _FLAGS.items():
        message = re.sub(rf"(?<![\w-]){name}=", f"{flag} ", message)
        if "_" in name:
            message = re.sub(rf"(?<![\w-]){name}\b", flag, message)
    return message
