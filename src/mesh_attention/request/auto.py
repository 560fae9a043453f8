"""How `method="auto"` chooses on a process group: it finds the machine, and `choose/` searches.

Every rank chooses for itself, and ranks compare their choices when they agree on the plan. Machines
may differ: then all follow the first rank, whose choice comes with the verdict.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist

from mesh_attention.choose.ask import choose as choose_on
from mesh_attention.choose.ask import enough_nodes, usual_machine
from mesh_attention.choose.auto import PlanChoice
from mesh_attention.choose.tuned import Tuned, read_tuned
from mesh_attention.cost.detect_cluster import Machine, find_cluster, gpu_of_driver, nic_gbits
from mesh_attention.errors import MeshAttentionError
from mesh_attention.machine.cluster import Cluster
from mesh_attention.machine.load import a_cluster
from mesh_attention.machine.rates import Costs, costs_of
from mesh_attention.plan.language.plan import Direction
from mesh_attention.plan.methods.question import Question, ask_passes
from mesh_attention.plan.methods.table import AUTO
from mesh_attention.plan.problem.problem import Problem
from mesh_attention.runtime.transport.groups import backend_of


@dataclass(frozen=True)
class AutoChoice:
    """A method and its options for each pass, and what else a plan depends on; `line` is for
    people."""

    line: str
    ranks_per_node: int
    costs: Costs
    passes: dict[str, tuple[str, dict[str, Any]]]
    options: str  # of the caller, which must be the same on all ranks

    @staticmethod
    def tuned(tuned: Tuned, problem: Problem, size: int, options: Mapping[str, Any]) -> AutoChoice:
        """What a file of `mesh-attention tune` says. `line` does not name the file: ranks compare
        it, and may have the same answers in files of different names."""
        answer = tuned.answer(problem, size, options)
        seconds = " + ".join(f"{s * 1e3:.3g}" for s in answer.pass_seconds.values())
        line = (
            f"tuned: {seconds} ms measured forward and backward on {size} ranks of "
            f"{answer.measured_on}"
        )
        passes = {direction.value: setting for direction, setting in answer.chosen.items()}
        return AutoChoice(line, answer.ranks_per_node, answer.costs, passes, _said(options))

    @staticmethod
    def of(choice: PlanChoice, machine: str) -> AutoChoice:
        """What a search chose; `machine` says in words where the cluster comes from."""
        asked = choice.asked
        passes = {d.value: (best.name, best.options) for d, best in choice.chosen.items()}
        seconds = " + ".join(f"{best.seconds * 1e3:.3g}" for best in choice.chosen.values())
        line = (
            f"{AUTO}: {seconds} ms modelled forward and backward on {asked.num_ranks} ranks of "
            f"{machine}; the best of {choice.tried} settings"
        )
        costs = costs_of(asked.cluster, asked.num_ranks)
        return AutoChoice(line, asked.cluster.node.ranks, costs, passes, _said(asked.options))

    @property
    def text(self) -> str:
        """For other ranks."""
        return json.dumps(asdict(self), sort_keys=True)

    def follow(self, text: str) -> AutoChoice:
        """The choice of the first rank, from its `text`. Raises if its caller gave other options
        than the caller here."""
        first = json.loads(text)
        if first["options"] != self.options:
            raise MeshAttentionError(
                f"options must be the same on all ranks: here {self.options}, on the first rank "
                f"{first['options']}"
            )
        return AutoChoice(
            f"{first['line']} (by the first rank; others found something else)",
            first["ranks_per_node"],
            Costs(**first["costs"]),
            {name: (method, options) for name, (method, options) in first["passes"].items()},
            self.options,
        )

    def question(self, problem: Problem, num_ranks: int) -> Question:
        chosen = {d: self.passes[d.value] for d in Direction}
        how: dict[str, Any] = {"ranks_per_node": self.ranks_per_node, "costs": self.costs}
        return ask_passes(problem, num_ranks, chosen, **how)


def _said(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in sorted(options.items())) or "none"


def choose(
    group: dist.ProcessGroup, problem: Problem, cluster: Any, options: Mapping[str, Any]
) -> AutoChoice:
    """Searches for a problem on this group; `cluster` None: on the machine that is found here."""
    size, said = dist.get_world_size(group), options.get("ranks_per_node")
    if cluster is None:
        here, line = cluster_here(group, said)
    else:
        here = a_cluster(cluster)
        line = f"{here.name}, as given"
        if here.num_ranks < size:
            raise MeshAttentionError(
                f"cluster: {here.name} has {here.num_ranks} ranks, fewer than the {size} of this "
                "group; describe a larger one (docs/clusters.md)"
            )
    return AutoChoice.of(choose_on(problem, size, cluster=here, **options), line)


def is_auto(arguments: Mapping[str, Any]) -> bool:
    method = arguments.get("method")
    named = AUTO if method is None else method
    return arguments.get("plan") is None and isinstance(named, str) and named == AUTO


def how_calls_choose(arguments: Mapping[str, Any]) -> str | None:
    """How methods are chosen where sizes come with calls, if they are chosen."""
    if arguments.get("tuned") is not None:
        return "tuned: looked up by the sizes of each call"
    return f"{AUTO}: chosen for the sizes of each call" if is_auto(arguments) else None


def take_chosen_by(options: dict[str, Any]) -> tuple[Cluster | None, Tuned | None]:
    """The cluster and the file of `tune` by which a method is chosen, out of the options."""
    cluster, tuned = options.pop("cluster", None), options.pop("tuned", None)
    if cluster is not None and not is_auto(options):
        raise MeshAttentionError(
            f"cluster={cluster if isinstance(cluster, str) else type(cluster).__name__}: only "
            f"method={AUTO!r} chooses by it; leave it out"
        )
    if tuned is not None and not is_auto(options):
        raise MeshAttentionError(
            f"tuned={str(tuned)!r}: the file sets the method; leave tuned or method out"
        )
    cluster = None if cluster is None else a_cluster(cluster)
    return cluster, None if tuned is None else read_tuned(tuned)


def ranks_of_nodes(ranks: list[int], local_world_size: str | None) -> int | None:
    """Ranks of a group that share a node, where launchers say how many processes a node has, and
    the group has as many on each and lists them node by node."""
    if local_world_size is None or not local_world_size.isdecimal() or not int(local_world_size):
        return None
    nodes = [rank // int(local_world_size) for rank in ranks]
    runs = [len([*same]) for _, same in groupby(nodes)]
    return runs[0] if len(set(runs)) == 1 and len(runs) == len(set(nodes)) else None


def cluster_here(group: dist.ProcessGroup, ranks_per_node: Any = None) -> tuple[Cluster, str]:
    """The cluster that `auto` takes on this group where none is given, and a line about it.
    `ranks_per_node`: if the caller says it."""
    ranks = dist.get_process_group_ranks(group)
    per_node = ranks_per_node or ranks_of_nodes(ranks, os.environ.get("LOCAL_WORLD_SIZE"))
    machine = _machine(group, per_node)
    if machine.gpu is None:  # links of what has no GPU say nothing about a cluster
        cluster = usual_machine(len(ranks), per_node)
        return cluster, f"{cluster.name} (no GPU found; cluster= changes it)"
    cluster, line = find_cluster(machine)
    return enough_nodes(cluster, len(ranks)), line


def _machine(group: dist.ProcessGroup, per_node: int | None) -> Machine:
    gpu, memory = gpu_of_driver(), None
    uses_gpus = backend_of(group) == dist.Backend.NCCL
    if uses_gpus and torch.cuda.is_available():  # otherwise CUDA stays as it is
        gpu = torch.cuda.get_device_name()
        here = torch.cuda.current_device()
        memory = torch.cuda.get_device_properties(here).total_memory / 2**30
    if gpu is None:
        return Machine()
    inside = per_node is not None and per_node >= dist.get_world_size(group)
    return Machine(gpu, None if inside else per_node, () if inside else nic_gbits(), memory)
