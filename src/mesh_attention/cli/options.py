"""The flags that describe a question, and the question that a command line asks.

Most commands ask for one plan (`plan_of`); `advise`, `report` and `tune` ask for the best of all
methods (`asked_of_all`). Flags of a plan are made from the options of the methods; flags of a
problem are listed here. Each keeps its value under its Python name, by which errors of the planner
are put in terms of flags. A flag that was left out is None: the planner has the defaults, except
for the sizes of a problem.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from typing import Any, get_origin

from mesh_attention.choose.ask import ask
from mesh_attention.choose.auto import PlanChoice, find_best
from mesh_attention.choose.scored import gpu_bytes
from mesh_attention.cli.command import Flag, UsageError
from mesh_attention.cli.output import Progress
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
from mesh_attention.cost import detect_cluster
from mesh_attention.machine.cluster import Cluster
from mesh_attention.machine.load import cluster_names, load_cluster
from mesh_attention.plan.language.plan import Direction, Plan
from mesh_attention.plan.methods.parts.assignment import PLACES
from mesh_attention.plan.methods.parts.setting import Option
from mesh_attention.plan.methods.table import AUTO, METHODS, all_options
from mesh_attention.plan.problem.mask import Mask
from mesh_attention.plan.problem.problem import Problem
from mesh_attention.step.model_shapes import MODELS, model_shape

DEFAULT_RANKS = 16
_TOKENS, _HEADS, _HEAD_DIM = 65536, 32, 128
MOST_RANKS = 1 << 16  # the programs of more would not fit into memory
PASSES = ("forward", "backward", "both")
_WINDOW_HELP = "keys around the query; RIGHT is 0 when left out, inf is no limit"
_SLICES_HELP = 'in place of masks: JSON, [[[query start, stop], [key start, stop], "causal"], ...]'
_RANKS_HELP = f"number of ranks (default {DEFAULT_RANKS}, or A*B of --tile)"
_PROBLEM = (
    Flag("--ranks", _RANKS_HELP, size, "N"),
    Flag("--tokens", "query tokens, as 128k or 1M (default 64k)", size, "N", to="q_tokens"),
    Flag("--heads", f"query heads (default {_HEADS})", size, "N", to="num_heads"),
    Flag("--kv-heads", "key and value heads (default: as --heads)", size, "N", to="num_kv_heads"),
    Flag("--head-dim", f"size of a query and key head (default {_HEAD_DIM})", size, "N"),
    Flag("--causal", "a query sees keys up to its own (default no)", both=True),
    Flag("--window", _WINDOW_HELP, window, "LEFT[:RIGHT]"),
    Flag("--documents", "packed documents: 0,...,tokens", starts, "STARTS"),
)
_MORE_OF_PROBLEM = (
    Flag("--kv-tokens", "key tokens (default: as many as queries)", size, "N"),
    Flag("--v-head-dim", "size of a value head (default: as --head-dim)", size, "N"),
    Flag("--element-bytes", "bytes of an element: 2, 4 or 8 (default 2)", size, "N"),
    Flag("--kv-documents", "the same for keys, where they differ", starts, "STARTS"),
    Flag("--prefix", "first keys that all see (with --causal)", count, "N"),
    Flag("--slices", _SLICES_HELP, json_file, "FILE"),
)
_MODEL_HELP = f"a known model, causal: {', '.join(MODELS)}; or a config.json of Hugging Face"
_CLUSTERS = f"{', '.join(cluster_names())}, or a TOML file"
_CLUSTER_HELP = f"{_CLUSTERS} (default: by this machine's GPU, or {detect_cluster.NEAREST})"
MODEL_FLAG = Flag("--model", _MODEL_HELP, str, "NAME|FILE")
FLAGS_OF_ALL = (
    MODEL_FLAG,
    Flag("--cluster", _CLUSTER_HELP, str, "NAME|FILE"),
    Flag("--memory", "of a GPU, such as 40GB (default: the cluster's)", byte_size, "SIZE"),
    Flag("--kernel", "use this kernel of the cluster where possible", str, "NAME"),
)


def add_plan_flags(parser: argparse.ArgumentParser) -> None:
    """`--pass`, and the flags of a question."""
    read_pass = one_of("pass", PASSES)
    help = "which direction (default both)"
    Flag("--pass", help, read_pass, "|".join(PASSES), to="passes").add_to(parser)
    add_question_flags(parser)


def add_question_flags(parser: argparse.ArgumentParser) -> None:
    for title, flags in (("problem", _PROBLEM), ("more of the problem", _MORE_OF_PROBLEM)):
        group = parser.add_argument_group(title)
        for flag in flags:
            flag.add_to(group)
    plan = parser.add_argument_group("plan")
    methods_text = f"{', '.join(METHODS)}; or {AUTO} (default): chosen by a search"
    Flag("--method", methods_text, str, "NAME").add_to(plan)
    groups = {tuple(METHODS): parser.add_argument_group("options of all methods")}
    for option, methods in all_options().values():
        if methods not in groups:
            groups[methods] = parser.add_argument_group(f"options of {', '.join(methods)}")
        if option.has_text:  # `costs` has none: only Python code can give it
            _option_flag(option).add_to(groups[methods])


def _option_flag(option: Option) -> Flag:
    name, default = f"--{option.name.replace('_', '-')}", option.default
    if option.type is bool:
        return Flag(name, f"{option.help} (default {'yes' if default else 'no'})", both=True)
    usual = "" if default is None else f" (default {default})"
    metavar = option.metavar
    reader: Callable[[str], Any]
    if isinstance(option.type, type) and issubclass(option.type, StrEnum):
        reader, metavar = one_of(option.name.replace("_", " "), option.type), "|".join(option.type)
    elif get_origin(option.type) is tuple:
        example = re.sub("[A-Z]+", "2", metavar)
        reader = pair(f"a pair such as {example} ({metavar})")
    elif option.type is int:
        reader = byte_size if option.name.endswith("_bytes") else size
    else:
        reader = fraction
    return Flag(name, option.help + usual, reader, metavar)


def plan_of(args: argparse.Namespace) -> Plan:
    method = {} if args.method is None else {"method": args.method}
    directions = directions_of(args)
    plan = ask(
        problem_of(args), ranks_of(args), directions=directions, **method, **options_of(args)
    ).plan()
    # After planning: if the planner refuses them, its error is the better one.
    for name in PLACES:
        if getattr(args, name) is not None and args.ranks_per_node is None:
            flag = name.replace("_", "-")
            raise UsageError(f"--{flag} places ranks on nodes: add --ranks-per-node N")
    tell_fewer_chunks(args, plan)
    return plan


def tell_fewer_chunks(args: argparse.Namespace, plan: Plan) -> None:
    """Says on standard error where a rank has fewer rows than chunks were asked for."""
    for pass_ in plan.passes:
        name = "backward_chunks" if pass_.direction is Direction.BACKWARD else "chunks"
        name = name if getattr(args, name) else "chunks"
        asked, made = getattr(args, name), pass_.setting.get("chunks")
        if asked is not None and made not in (None, f"{asked[0]}x{asked[1]}"):
            flag = f"--{name.replace('_', '-')} {asked[0]}x{asked[1]}"
            print(
                f"note: {flag} became {made} in the {pass_.direction} pass, "
                "as a rank has no more rows",
                file=sys.stderr,
            )


def options_of(args: argparse.Namespace) -> dict[str, Any]:
    """The options on this command line, by their names in Python."""
    return _present(args, *all_options())


def directions_of(args: argparse.Namespace) -> tuple[Direction, ...]:
    if args.passes in (None, "both"):
        return tuple(Direction)
    direction = Direction(args.passes)
    for name, value in options_of(args).items():
        is_of_backward = name == "gather_out" or name.startswith("backward_")
        if direction is Direction.FORWARD and is_of_backward and value:
            flag = f"--{name.replace('_', '-')}"
            raise UsageError(f"{flag} is about the backward pass; leave it or --pass forward out")
    return (direction,)


def ranks_of(args: argparse.Namespace) -> int:
    ranks: int | None = args.ranks
    if ranks is None:
        ranks = args.tile[0] * args.tile[1] if args.tile else DEFAULT_RANKS
    if ranks > MOST_RANKS:
        raise UsageError(f"--ranks {ranks} is more than a plan can hold; at most {MOST_RANKS}")
    return ranks


def problem_of(args: argparse.Namespace) -> Problem:
    mask = _present(args, *(field.name for field in fields(Mask)))
    if "window" in mask and mask["window"][1] == 0:
        mask.setdefault("causal", True)
    sizes = _present(args, *(field.name for field in fields(Problem) if field.name != "mask"))
    defaults = {"q_tokens": _TOKENS, "num_heads": _HEADS, "head_dim": _HEAD_DIM}
    return Problem(**{**defaults, **sizes}, mask=Mask(**mask))


def _present(args: argparse.Namespace, *names: str) -> dict[str, Any]:
    values = {name: getattr(args, name, None) for name in names}
    return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True)
class AskedOfAll:
    """The question to all methods. GPUs of `cluster` have the memory that one sequence of the batch
    may take; `found_by` says in words how the cluster was chosen."""

    problem: Problem
    ranks: int
    cluster: Cluster
    found_by: str
    directions: tuple[Direction, ...]
    options: dict[str, Any]
    kernel: str | None
    batch: int  # sequences that share the memory of a GPU

    def search(self, tell: Progress | None) -> PlanChoice:
        return find_best(
            self.problem,
            self.ranks,
            self.cluster,
            directions=self.directions,
            options=self.options,
            kernel=self.kernel,
            progress=tell,
        )


def asked_of_all(args: argparse.Namespace, command: str) -> AskedOfAll:
    """The question of `command`, which is named in the error about a flag that it does not take."""
    if args.method is not None:
        raise UsageError(
            f"{command} compares all methods; leave --method out, or see simulate --best"
        )
    if args.model is not None:
        for name, value in model_shape(args.model).heads.items():
            if getattr(args, name) is None:
                setattr(args, name, value)
        if args.causal is None and args.slices is None:
            args.causal = True
    problem, ranks, options = problem_of(args), ranks_of(args), options_of(args)
    cluster, found_by = cluster_of(args)
    batch = getattr(args, "batch", None) or 1
    share = with_memory(cluster, gpu_bytes(cluster) / batch)
    return AskedOfAll(
        problem, ranks, share, found_by, directions_of(args), options, args.kernel, batch
    )


def cluster_of(args: argparse.Namespace) -> tuple[Cluster, str]:
    """The cluster of `--cluster` or else of this machine, with the memory of `--memory`, and how it
    was chosen, in words."""
    if args.cluster is None:
        gpu = detect_cluster.gpu_of_driver()
        nics = detect_cluster.nic_gbits() if gpu else ()
        machine = detect_cluster.Machine(gpu, nic_gbits=nics)
        cluster, found_by = detect_cluster.find_cluster(machine)
    else:
        cluster = load_cluster(args.cluster)
        found_by = f"{cluster.name}, as given"
    memory = getattr(args, "memory", None)
    return with_memory(cluster, memory) if memory else cluster, found_by


def with_memory(cluster: Cluster, num_bytes: float) -> Cluster:
    return replace(cluster, gpu=replace(cluster.gpu, memory_gib=num_bytes / 2**30))
