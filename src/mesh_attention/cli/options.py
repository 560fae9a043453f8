"""The flags that describe a question, and the question that a command line asks.

Most commands ask for one plan (`plan_of`); `advise`, `report` and `tune` ask for the best of all
methods (`asked_of_all`). Flags of a plan are made from the options of the methods; flags of a
problem are listed here. Each keeps its value under its Python name, by which errors of the planner
are put in terms of flags. A flag that was left out is None: the planner has the defaults, except
for the sizes of a problem.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from typing import Any, get_origin

from mesh_attention.choose.ask import ask
from mesh_attention.choose.auto import PlanChoice, find_best
from mesh_attention.choose.scored import gpu_bytes
from mesh_attention.cli.command import Args, Flag, Read, flags
from mesh_attention.cli.output import Progress
from mesh_attention.cli.values import (
    UsageError,
    byte_size,
    count,
    fraction,
    json_file,
    one_of,
    pair,
    size,
)
from mesh_attention.cost import detect_cluster
from mesh_attention.cost.operation_costs import Overlap
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
_PROBLEM = f"""
--ranks N              number of ranks (default {DEFAULT_RANKS}, or A*B of --tile)
--tokens N             query tokens, as 128k or 1M (default 64k)
--heads N              query heads (default {_HEADS})
--kv-heads N           key and value heads (default: as --heads)
--head-dim N           size of a query and key head (default {_HEAD_DIM})
--causal, --no-causal  a query sees keys up to its own (default no)
--window LEFT[:RIGHT]  keys around the query; RIGHT is 0 when left out, inf is no limit
--documents STARTS     packed documents: 0,...,tokens
"""
_MORE_OF_PROBLEM = """
--kv-tokens N          key tokens (default: as many as queries)
--v-head-dim N         size of a value head (default: as --head-dim)
--element-bytes N      bytes of an element: 2, 4 or 8 (default 2)
--kv-documents STARTS  the same for keys, where they differ
--prefix N             first keys that all see (with --causal)
--slices FILE          in place of masks: JSON, [[[query start, stop], [key start, stop], "causal"],
                       ...]
"""
_PASS = "--pass forward|backward|both  which direction (default both)"
_READ: dict[str, Read] = {"prefix": count, "slices": json_file}
# Flags of pages of several commands.
CLUSTERS = ", ".join(cluster_names())
MODEL_FLAG = f"""\
--model NAME|FILE    a known model, causal: {", ".join(MODELS)}; or a config.json of Hugging Face"""
FLAGS_OF_ALL = f"""\
{MODEL_FLAG}
--cluster NAME|FILE  {CLUSTERS}, or a TOML file (default: by this machine's GPU, or
                     {detect_cluster.NEAREST})
--memory SIZE        of a GPU, such as 40GB (default: the cluster's)
--kernel NAME        use this kernel of the cluster where possible"""


def plan_flags() -> list[Flag]:
    """`--pass`, and the flags of a question."""
    return [*flags(_PASS), *question_flags()]


def question_flags() -> list[Flag]:
    methods = ", ".join(METHODS)
    # First the options that all methods have. `costs` has no text: only Python code can give it.
    options = sorted(all_options().values(), key=lambda option: option[1] != tuple(METHODS))
    return [
        *flags(_PROBLEM, "problem"),
        *flags(_MORE_OF_PROBLEM, "more of the problem", seldom=True, read=_READ),
        *flags(f"--method NAME  {methods}; or {AUTO} (default): chosen by a search", "plan"),
        *(_option_flag(*option) for option in options if option[0].has_text),
    ]


def _option_flag(option: Option, methods: tuple[str, ...]) -> Flag:
    name, metavar = option.name.replace("_", "-"), option.metavar
    names: tuple[str, ...] = (f"--{name}",)
    usual = "" if option.default is None else f" (default {option.default})"
    reader: Callable[[str], Any] | None
    if option.type is bool:
        names, metavar, reader = (f"--{name}", f"--no-{name}"), "", None
        usual = f" (default {'yes' if option.default else 'no'})"
    elif isinstance(option.type, type) and issubclass(option.type, StrEnum):
        reader, metavar = one_of(option.name.replace("_", " "), option.type), "|".join(option.type)
    elif get_origin(option.type) is tuple:
        reader = pair(f"a pair such as {re.sub('[A-Z]+', '2', metavar)} ({metavar})")
    elif option.type is int:
        reader = byte_size if option.name.endswith("_bytes") else size
    else:
        reader = fraction
    of_all = methods == tuple(METHODS)
    group = f"options of {'all methods' if of_all else ', '.join(methods)}"
    return Flag(names, metavar, option.help + usual, reader, group, is_seldom=True)


@dataclass(frozen=True)
class Asked:
    """The question of how fast plans are on a cluster. Its GPUs have the memory that one sequence
    of the batch may take; `found_by` says in words how the cluster was chosen."""

    problem: Problem
    ranks: int
    cluster: Cluster
    found_by: str
    directions: tuple[Direction, ...]
    method: str | None  # None: all
    options: dict[str, Any]
    kernel: str | None
    batch: int  # sequences that share the memory of a GPU

    def search(self, tell: Progress | None, overlap: Overlap | str = Overlap.EVENTS) -> PlanChoice:
        return find_best(
            self.problem,
            self.ranks,
            self.cluster,
            directions=self.directions,
            options=self.options,
            method=self.method,
            overlap=overlap,
            kernel=self.kernel,
            progress=tell,
        )


def asked_on(args: Args, cluster: Cluster, found_by: str = "") -> Asked:
    batch = getattr(args, "batch", None) or 1
    return Asked(
        problem_of(args),
        ranks_of(args),
        with_memory(cluster, gpu_bytes(cluster) / batch),
        found_by,
        directions_of(args),
        None if args.method == AUTO else args.method,
        options_of(args),
        getattr(args, "kernel", None),
        batch,
    )


def asked_of_all(args: Args, command: str) -> Asked:
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
    return asked_on(args, *cluster_of(args))


def plan_of(args: Args, cluster: Cluster | None = None) -> Plan:
    """The plan that is asked for, on a cluster where one is named."""
    how: dict[str, Any] = {"directions": directions_of(args), "cluster": cluster}
    if args.method is not None:
        how["method"] = args.method
    plan = ask(problem_of(args), ranks_of(args), **how, **options_of(args)).plan()
    # After planning: if the planner refuses them, its error is the better one.
    for name in PLACES:
        if getattr(args, name) is not None and args.ranks_per_node is None and cluster is None:
            flag = name.replace("_", "-")
            raise UsageError(f"--{flag} places ranks on nodes: add --ranks-per-node N")
    tell_fewer_chunks(args, plan)
    return plan


def tell_fewer_chunks(args: Args, plan: Plan) -> None:
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


def options_of(args: Args) -> dict[str, Any]:
    """The options on this command line, by their names in Python."""
    return _present(args, *all_options())


def directions_of(args: Args) -> tuple[Direction, ...]:
    passes = getattr(args, "passes", None)  # tune measures both
    if passes in (None, "both"):
        return tuple(Direction)
    direction = Direction(passes)
    for name, value in options_of(args).items():
        is_of_backward = name == "gather_out" or name.startswith("backward_")
        if direction is Direction.FORWARD and is_of_backward and value:
            flag = f"--{name.replace('_', '-')}"
            raise UsageError(f"{flag} is about the backward pass; leave it or --pass forward out")
    return (direction,)


def ranks_of(args: Args) -> int:
    ranks: int | None = args.ranks
    if ranks is None:
        ranks = args.tile[0] * args.tile[1] if args.tile else DEFAULT_RANKS
    if ranks > MOST_RANKS:
        raise UsageError(f"--ranks {ranks} is more than a plan can hold; at most {MOST_RANKS}")
    return ranks


def problem_of(args: Args) -> Problem:
    mask = _present(args, *(field.name for field in fields(Mask)))
    if "window" in mask and mask["window"][1] == 0:
        mask.setdefault("causal", True)
    sizes = _present(args, *(field.name for field in fields(Problem) if field.name != "mask"))
    defaults = {"q_tokens": _TOKENS, "num_heads": _HEADS, "head_dim": _HEAD_DIM}
    return Problem(**{**defaults, **sizes}, mask=Mask(**mask))


def _present(args: Args, *names: str) -> dict[str, Any]:
    values = {name: getattr(args, name, None) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def cluster_of(args: Args) -> tuple[Cluster, str]:
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
