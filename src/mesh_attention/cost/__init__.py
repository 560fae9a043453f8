"""How long a plan takes on a cluster: the estimate of one rank, and the timeline of all ranks.

Nothing here imports torch. Clusters themselves, which know no plan, are in `machine/`.
Experimental.
"""

from mesh_attention.cost.operation_costs import Overlap
from mesh_attention.cost.simulator import simulate
from mesh_attention.cost.timeline import Timeline
from mesh_attention.machine.cluster import Cluster
from mesh_attention.machine.load import cluster_names, load_cluster

__all__ = ["Cluster", "Overlap", "Timeline", "cluster_names", "load_cluster", "simulate"]
