"""How `method="auto"` chooses on a process group: the machine, an answer that was searched, and the
first answer where there is none.

Every rank chooses for itself, and ranks compare what they chose with when they agree on the plan.
Machines, files and answers in them may differ: then all follow the first rank, whose choice comes
with the verdict.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from mesh_attention.choose.answers import Chosen, is_measured, kept_answer, question_of_answer
from mesh_attention.cost.detect_cluster import Machine, find_cluster, gpu_of_driver, nic_gbits
from mesh_attention.cost.machine.cluster import Cluster
from mesh_attention.cost.machine.load import a_cluster
from mesh_attention.cost.machine.rates import Costs, Rates, costs_of, rates_of, usual_rates
from mesh_attention.cost.planning import tokens_stay
from mesh_attention.errors import MeshAttentionError
from mesh_attention.plan.methods.table import AUTO, DEFAULT_METHOD, METHODS, all_options
from mesh_attention.plan.plan import Direction
from mesh_attention.plan.problem import Problem
from mesh_attention.plan.question import Question, ask, joined


@dataclass(frozen=True)
class AutoChoice:
    """What ranks choose by. `options` are the caller's; `chosen` is a searched answer."""

    machine: str
    rates: Rates
    costs: Costs
    ranks_per_node: int | None
    options: dict[str, Any]
    chosen: Chosen | None = None

    @property
    def text(self) -> str:
        """For other ranks: all but the options, which are the same everywhere or refused."""
        told = asdict(replace(self, options={}))
        return json.dumps(told, sort_keys=True)

    def follow(self, text: str) -> AutoChoice:
        """With what another rank chose by."""
        told = json.loads(text)
        rates: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in told["rates"].items()
        }
        return AutoChoice(
            f"{told['machine']} (by the first rank; others found something else)",
            Rates(**rates),
            Costs(**told["costs"]),
            told["ranks_per_node"],
            self.options,
            told["chosen"],
        )

    def question(self, problem: Problem, num_ranks: int) -> Question:
        nodes = {} if self.ranks_per_node is None else {"ranks_per_node": self.ranks_per_node}
        given = nodes | self.options
        if self.chosen is None:
            how: dict[str, Any] = {"method": AUTO, "rates": self.rates, **given}
            return ask(problem, num_ranks, **how)
        questions = []
        for direction in Direction:
            one = self.chosen[direction.value]
            costs = {"costs": self.costs} if "costs" in METHODS[one["method"]].options() else {}
            how = {"method": one["method"], "directions": (direction,), **costs, **given}
            questions.append(ask(problem, num_ranks, **(how | one["options"])))
        return joined(*questions)

    def told(self, question: Question) -> str:
        """One line for people."""
        what = "first answer" if self.chosen is None else "searched answer"
        what = "tuned answer" if is_measured(self.chosen) else what
        return f"{what} of {AUTO}, for {question.num_ranks} ranks on {self.machine}"


def choose(group: dist.ProcessGroup, given: Mapping[str, Any], asked: Question) -> AutoChoice:
    """For the arguments of an object, of which `asked` is what they ask for without a look at the
    machine."""
    options = {name: given[name] for name in all_options() if given.get(name) is not None}
    ranks = dist.get_process_group_ranks(group)
    found = per_node = ranks_of_nodes(ranks, os.environ.get("LOCAL_WORLD_SIZE"))
    if given.get("cluster") is None:
        machine = _machine(group, per_node)
        cluster, line = find_cluster(machine)
        rates = usual_rates() if machine.gpu is None else rates_of(cluster)
        if per_node is not None and per_node >= len(ranks):
            per_node = None  # one node, as where nobody says anything of nodes
    else:
        cluster = a_cluster(given["cluster"])
        line, per_node = f"{cluster.name}, as given", cluster.node.ranks
        rates = rates_of(cluster)
        if cluster.num_ranks < len(ranks):
            raise MeshAttentionError(
                f"cluster: {cluster.name} has {cluster.num_ranks} ranks, fewer than the "
                f"{len(ranks)} of this group; describe a larger one (docs/simulate.md)"
            )
    chosen = kept_answer(asked.problem, len(ranks), cluster, options)
    if chosen is not None:
        kept = question_of_answer(asked.problem, len(ranks), cluster, chosen)
        if not tokens_stay(kept.plan(), options):  # whoever kept it: no file moves tokens
            chosen = None
    if chosen is not None:
        per_node = cluster.node.ranks
    per_node = options.get("ranks_per_node") or per_node
    costs = costs_of(cluster, len(ranks))
    if node := per_node or found:
        rates = replace(rates, ranks_per_node=node)
    return AutoChoice(line, rates, costs, per_node, options, chosen)


def is_auto(given: Mapping[str, Any]) -> bool:
    return given.get("plan") is None and (given.get("method") or DEFAULT_METHOD) == AUTO


def told_of_calls(given: Mapping[str, Any]) -> str | None:
    """How methods are chosen where sizes come with calls, if they are chosen."""
    if not is_auto(given):
        return None
    cluster = given.get("cluster")
    rates = "usual rates" if cluster is None else f"the rates of {a_cluster(cluster).name}"
    return f"first answer of {AUTO} to the sizes of the call, by {rates}"


def cluster_for(method: Any, cluster: Any) -> Cluster | None:
    """The cluster that was given, where something is chosen by it."""
    if cluster is None:
        return None
    if (method or DEFAULT_METHOD) != AUTO:
        raise MeshAttentionError(
            f"cluster={cluster if isinstance(cluster, str) else type(cluster).__name__}: only "
            f"method={AUTO!r} chooses by it; leave it out"
        )
    return a_cluster(cluster)


def ranks_of_nodes(ranks: list[int], local_world_size: str | None) -> int | None:
    """Ranks of a group that share a node, where launchers say how many processes a node has, and
    the group has as many on each and lists them node by node."""
    if local_world_size is None or not local_world_size.isdecimal() or not int(local_world_size):
        return None
    nodes = [rank // int(local_world_size) for rank in ranks]
    edges = [0, *(at for at, (a, b) in enumerate(pairwise(nodes), 1) if a != b), len(nodes)]
    sizes = {stop - start for start, stop in pairwise(edges)}
    in_order = len(edges) - 1 == len(set(nodes))
    return sizes.pop() if len(sizes) == 1 and in_order else None


def _machine(group: dist.ProcessGroup, per_node: int | None) -> Machine:
    gpu, memory = gpu_of_driver(), None
    uses_gpus = dist.get_backend(group) == dist.Backend.NCCL
    if uses_gpus and torch.cuda.is_available():  # otherwise CUDA stays as it is
        gpu = torch.cuda.get_device_name()
        here = torch.cuda.current_device()
        memory = torch.cuda.get_device_properties(here).total_memory / 2**30
    if gpu is None:
        return Machine()  # links of what has no GPU say nothing about a cluster
    inside = per_node is not None and per_node >= dist.get_world_size(group)
    return Machine(gpu, None if inside else per_node, () if inside else nic_gbits(), memory)


def cluster_here(group: dist.ProcessGroup) -> tuple[Cluster, str]:
    """The one that `auto` takes on this group where none is given, and a line about it."""
    ranks = dist.get_process_group_ranks(group)
    per_node = ranks_of_nodes(ranks, os.environ.get("LOCAL_WORLD_SIZE"))
    return find_cluster(_machine(group, per_node))
