"""What a caller chooses for calls besides the plan, and which of it ranks must choose alike."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import timedelta
from enum import StrEnum
from functools import cached_property

import torch

from mesh_attention.kernels import table_version
from mesh_attention.machine.cluster import Links
from mesh_attention.machine.rates import usual_links
from mesh_attention.runtime.agreement.identity import Statement
from mesh_attention.runtime.session.transports import TransportName


class Determinism(StrEnum):
    """Whether the same bits are asked for every time."""

    ANY = "any"
    PREFERRED = "preferred"  # a warning where no kernel can
    REQUIRED = "required"  # an error there
    ANY_RANKS = "any ranks"  # besides, the bits that any other number of ranks gives


def asked_of_torch() -> Determinism:
    """By `torch.use_deterministic_algorithms`."""
    if not torch.are_deterministic_algorithms_enabled():
        return Determinism.ANY
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    return Determinism.PREFERRED if warns else Determinism.REQUIRED


@dataclass(frozen=True)
class CallOptions:
    softmax_scale: float | None = None
    softcap: float = 0.0
    differentiable_lse: bool = False
    kernel: str | None = None
    transport: TransportName = TransportName.AUTO
    cuda_graph: bool = False
    nvtx: bool = False
    timeout: timedelta | None = None
    kernels: int = field(default_factory=table_version)  # a choice is made from the table of then
    must_be_deterministic: bool = False  # whatever PyTorch is asked for
    deterministic: Determinism = field(default_factory=asked_of_torch)
    links: Links = field(default_factory=usual_links)  # by which calls make room for transfers
    tuned: str | None = None  # digest of the answers that plans come from
    return_lse: bool = True  # somebody may look at it

    def now(self) -> CallOptions:
        """With what PyTorch is asked for at this time, unless the caller asks for more."""
        asked = asked_of_torch()
        if asked is self.deterministic or self.must_be_deterministic:
            return self
        return replace(self, deterministic=asked)

    def for_lse(self, return_lse: bool, sinks: object) -> CallOptions:
        """For a call whose lse the caller asks for, or sinks and gradients need; or nobody."""
        if return_lse or sinks is not None or self.differentiable_lse:
            return self
        return replace(self, return_lse=False)

    @cached_property
    def statement(self) -> Statement:
        """What must be the same on all ranks; kernels may differ, as devices may."""
        statement = {
            "softmax_scale": self.softmax_scale,
            "softcap": self.softcap,
            "differentiable_lse": self.differentiable_lse,
            "return_lse": self.return_lse,
            "transport": self.transport.value,
            "cuda_graph": self.cuda_graph,
            "deterministic": self.deterministic.value,
            "timeout": self.timeout and self.timeout.total_seconds(),
            "tuned": self.tuned,
        }
        if self.cuda_graph:  # ranks capture a graph together, so all must see that one is missing
            statement |= {
                "kernel": self.kernel,
                "nvtx": self.nvtx,
                "kernels registered": self.kernels,
                "links": str(self.links),
            }
        return statement

    @cached_property
    def compared(self) -> CallOptions:
        """Equal on all ranks where their statements are: without what only this rank chooses."""
        if self.cuda_graph:
            return self
        return replace(self, kernel=None, nvtx=False, kernels=0, links=usual_links())

    @cached_property
    def of_batch(self) -> CallOptions:
        """For calls whose plan comes with a batch: memory is not shared anew for each of them."""
        return replace(self, transport=TransportName.DISTRIBUTED)
