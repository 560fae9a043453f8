"""Clusters as data, and the timeline of a plan on one of them. Nothing here imports torch."""

from mesh_attention.cluster.cluster import Cluster
from mesh_attention.cluster.load import cluster_names, load_cluster
from mesh_attention.cluster.simulate import simulate
from mesh_attention.cluster.timeline import Timeline
from mesh_attention.cluster.waits import Overlap

__all__ = ["Cluster", "Overlap", "Timeline", "cluster_names", "load_cluster", "simulate"]
