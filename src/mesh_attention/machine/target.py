"""What a program is compiled for: a value that compares, and that plan files hold as JSON.

It holds all that the passes of `plan/passes/` depend on. Ranks with other kernels have other
targets; their programs differ in local calls, and in nothing that is communicated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from mesh_attention.machine.cluster import Gpu, Links
from mesh_attention.machine.kernel_facts import KernelRates, PassRates
from mesh_attention.machine.tables import read_table, without_none

SMS_OF_TRANSFERS = 16  # NCCL's channels hold one each


@dataclass(frozen=True)
class Target:
    """What the programs of a rank depend on, beside the plan."""

    name: str
    gpu: Gpu
    kernels: dict[str, KernelRates]
    forward: dict[str, str]  # for each kind of call the name of its kernel
    backward: dict[str, str]
    links: Links
    own_stream: bool = True  # transfers have a stream of their own
    shows_workspace: bool = False  # other ranks read buffers where a plan places them
    element_bytes: int = 2
    softcap: bool = False
    deterministic: bool = False
    lse_gradient: bool = False
    two_streams: bool = True  # calls may take turns on two streams, if transfers have their own
    rectangles: tuple[str, ...] = ()  # passes whose attentions stay rectangles of calls

    @property
    def takes_turns(self) -> bool:
        """Whether kernel calls take turns on two streams."""
        return self.own_stream and self.two_streams

    def kernel(self, direction: str, kind: str) -> tuple[str, PassRates] | None:
        """The kernel for such calls, with its rates; None where no kernel at hand takes them."""
        name = (self.forward if direction == "forward" else self.backward).get(kind)
        rates = None if name is None else self.kernels[name].of(direction)
        return None if name is None or rates is None else (name, rates)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def __hash__(self) -> int:
        return hash((self.name, self.gpu, self.links, *self.forward.items()))


def read_target(table: Mapping[str, Any]) -> Target:
    """From what `to_json` made of it."""
    fields = dict(table)
    fields["links"] = read_table(Links, without_none(table["links"]), "target.links")
    fields["gpu"] = read_table(Gpu, without_none(table["gpu"]), "target.gpu")
    fields["kernels"] = {
        name: read_table(KernelRates, without_none(rates), f"target.kernels.{name}")
        for name, rates in table["kernels"].items()
    }
    fields["rectangles"] = tuple(table.get("rectangles", ()))
    return Target(**fields)
