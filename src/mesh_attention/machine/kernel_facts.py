"""What is known of a kernel's speed: curves over the sizes of calls, and how it shares a GPU.

The facts of the library's own kernels are TOML files beside their adapters (`kernels/NAME.toml`),
read here without an adapter, which needs torch. A kernel that users register has
them as an attribute, `facts`. A cluster's file has curves of its own where its GPUs are others.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib import resources
from typing import Any

from mesh_attention.machine.tables import ClusterError, read_table, without_none

KINDS = ("full", "causal", "range")  # of calls, as `CallKind` has them
UNKNOWN_TFLOPS = 700.0  # of a kernel without facts: it was registered to be used


@dataclass(frozen=True, slots=True)
class KernelRate:
    """A curve over the size of a call. Rows count as many heads as `REFERENCE_HEADS`."""

    tflops: float
    half_rows: float
    half_columns: float


REFERENCE_HEADS = 64  # a call with fewer heads fills the GPU as fewer rows would


@dataclass(frozen=True, slots=True)
class PassRates:
    """One pass of a kernel, with curves for the kinds of calls that it takes: the fields of a file
    (docs/clusters.md).

    Without `lets_transfers_begin` the kernel holds all SMs until a call is over, and communications
    begin between two calls. `tile_rows`: each SM computes tile after tile, so that the time of a
    call shows rounds. `pair_sms`: full calls are pairs of programs where a head has an even number
    of tiles, and those of a call that leaves fewer SMs than this do not all find a place beside a
    communication that began on an idle GPU: some begin when others end, with all tiles to do.
    """

    ranges: bool
    lets_transfers_begin: bool
    sm_margin: int
    launch_microseconds: float
    full: KernelRate | None = None
    causal: KernelRate | None = None
    range: KernelRate | None = None
    tile_rows: int | None = field(default=None, kw_only=True)
    tile_keys: int | None = field(default=None, kw_only=True)
    slowdown: float | None = field(default=None, kw_only=True)
    keys_in_runs: bool | None = field(default=None, kw_only=True)
    pair_sms: int | None = field(default=None, kw_only=True)

    def lost(self, sms: int) -> float | None:
        """The part of its speed that a call loses beside a communication, on a GPU with so many
        SMs; None: what the cluster says of all kernels."""
        return self.sm_margin / sms if self.sm_margin else self.slowdown

    def rate(self, kind: str) -> KernelRate | None:
        """The curve of calls that are `full`, `causal` or `range`."""
        return {"full": self.full, "causal": self.causal, "range": self.range}[kind]

    def curve(self, kind: str) -> KernelRate | None:
        """The curve for calls of a kind: a kernel with `ranges` does causal calls as ranges."""
        return self.range if self.ranges and kind != "full" else self.rate(kind)

    @property
    def rates(self) -> dict[str, KernelRate]:
        return {kind: rate for kind in KINDS if (rate := self.rate(kind)) is not None}


@dataclass(frozen=True, slots=True)
class KernelRates:
    """A kernel, by the name that the runtime has for it; it may have one pass only."""

    forward: PassRates | None = None
    backward: PassRates | None = None

    def of(self, direction: str) -> PassRates | None:
        return self.forward if direction == "forward" else self.backward


@dataclass(frozen=True, slots=True)
class KernelFacts:
    """`module`: the Python module that it needs besides PyTorch, and `install` the packages that
    bring it. `measured_on`: GPUs of that kind have these rates."""

    measured_on: str
    forward: PassRates | None = None
    backward: PassRates | None = None
    module: str | None = None
    install: str | None = None

    @property
    def rates(self) -> KernelRates:
        return KernelRates(self.forward, self.backward)


@cache
def library_facts() -> Mapping[str, KernelFacts]:
    """The facts of the library's own kernels, by name."""
    facts: dict[str, KernelFacts] = {}
    folder = resources.files("mesh_attention") / "kernels"
    for file in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if file.name.endswith(".toml"):
            table = tomllib.loads(file.read_text(encoding="utf-8"))
            name = file.name.removesuffix(".toml")
            facts[name] = read_table(KernelFacts, table, f"kernels/{file.name}")
    return facts


def library_kernels(measured_on: str = "H200") -> dict[str, KernelRates]:
    """The library's kernels whose facts were measured on GPUs of this kind."""
    return {
        name: facts.rates
        for name, facts in library_facts().items()
        if facts.measured_on == measured_on
    }


def facts_fault(kernel: Any) -> str | None:
    """What is wrong with the facts that a kernel brings, in words."""
    facts = getattr(kernel, "facts", None)
    if facts is None:
        return None
    if not isinstance(facts, KernelRates | KernelFacts):
        return f"they must be KernelRates, with a pass of PassRates each, not {facts!r}"
    for direction, rates in (("forward", facts.forward), ("backward", facts.backward)):
        if rates is not None and not (isinstance(rates, PassRates) and rates.rates):
            return f"{direction} must be PassRates with at least one curve, not {rates!r}"
    try:
        read_table(type(facts), without_none(asdict(facts)), type(facts).__name__)
    except ClusterError as error:
        return str(error)
    return None


def facts_of(kernel: Any) -> KernelRates:
    """The rates that a kernel brings, or else those of the library. A kernel without any counts as
    fast."""
    own = getattr(kernel, "facts", None)
    known: KernelRates | KernelFacts = own or library_facts().get(kernel.name) or UNKNOWN
    return KernelRates(known.forward or _PASS, known.backward or _PASS)


_FAST = KernelRate(UNKNOWN_TFLOPS, 0.0, 0.0)
_PASS = PassRates(True, False, 0, 12.0, _FAST, _FAST, _FAST)
UNKNOWN = KernelRates(_PASS, _PASS)
