"""How long things take: machines as data, the estimate of one rank, and the timeline of all ranks.
Nothing here imports torch. `machine/` knows no plan; what is here stands on plans."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mesh_attention.cost.simulator import simulate
    from mesh_attention.cost.timeline import Timeline
    from mesh_attention.cost.waits import Overlap
    from mesh_attention.machine.cluster import Cluster
    from mesh_attention.machine.load import cluster_names, load_cluster

__all__ = ["Cluster", "Overlap", "Timeline", "cluster_names", "load_cluster", "simulate"]

# Found when they are asked for: plans ask `machine/`, and these ask plans.
_PLACES = {
    "Cluster": "machine.cluster",
    "Overlap": "waits",
    "Timeline": "timeline",
    "cluster_names": "machine.load",
    "load_cluster": "machine.load",
    "simulate": "simulator",
}


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in _PLACES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
