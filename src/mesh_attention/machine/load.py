"""Reads clusters from TOML: the library's by name, a person's own by path. It writes nothing.

The search, the simulator and `--cluster` get their clusters here, or a `ClusterError`. Every field
is required and no other is accepted, so that no constant is a default that nobody chose. Kernels
are the exception. Each has the passes and curves that it supports. A file without `kernels` gets
those of the library, or with `kernels_of` those of another of the library's clusters;
`more_kernels` adds to them.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

from mesh_attention.errors import did_you_mean
from mesh_attention.files import FileError, read_text
from mesh_attention.machine.cluster import Cluster
from mesh_attention.machine.kernel_facts import KINDS, library_kernels
from mesh_attention.machine.tables import ClusterError, read_table

__all__ = ["ClusterError", "a_cluster", "cluster_names", "load_cluster", "parse_cluster"]

DIRECTIONS = ("forward", "backward")
_FOLDER = resources.files("mesh_attention.machine") / "clusters"
MOST_BYTES, MOST_COLUMNS = 1 << 17, 1000


def cluster_names() -> tuple[str, ...]:
    files = (entry.name for entry in _FOLDER.iterdir())
    return tuple(sorted(name.removesuffix(".toml") for name in files if name.endswith(".toml")))


def load_cluster(name_or_file: str | Path) -> Cluster:
    """The cluster of the library with this name, else the cluster of the TOML file at this path.

    >>> load_cluster("hgx-h100").node.ranks
    8
    """
    if not isinstance(name_or_file, str | Path):
        raise ClusterError(f"{name_or_file!r} is not a cluster; give a name or a TOML file")
    name = str(name_or_file)
    if name in cluster_names():
        return parse_cluster((_FOLDER / f"{name}.toml").read_text(encoding="utf-8"), name)
    path = Path(name_or_file)
    if len(name) > 1000 or not path.is_file():
        known = cluster_names()
        raise ClusterError(
            f"no cluster {name[:100]!r}{did_you_mean(name, known)}: it is neither a file nor one "
            f"of {', '.join(known)}"
        )
    try:
        text = read_text(path, most_bytes=MOST_BYTES)
    except FileError as error:
        raise ClusterError(str(error)) from error
    return parse_cluster(text, str(path))


def a_cluster(value: Any) -> Cluster:
    """`value` itself if it is a cluster, else the cluster of this name or file."""
    return value if isinstance(value, Cluster) else load_cluster(value)


def parse_cluster(text: str, source: str) -> Cluster:
    """The cluster that a TOML text describes; `source` names the text in errors."""
    if not isinstance(text, str):
        raise ClusterError(f"{source}: {type(text).__name__} is not text")
    # A key of thousands of parts takes tomllib minutes, and nests tables too deeply to be read.
    if len(text) > MOST_BYTES or max(map(len, text.splitlines()), default=0) > MOST_COLUMNS:
        raise ClusterError(
            f"{source} is not the description of a cluster: it has more than {MOST_BYTES} "
            f"characters, or a line of more than {MOST_COLUMNS}"
        )
    try:
        table = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ClusterError(f"{source} is not TOML: {error}") from error
    return read_cluster(table, source)


def read_cluster(table: Mapping[str, Any], source: str) -> Cluster:
    """The cluster of a table that `tomllib` has read; `source` names the file in errors."""
    own = dict(table)
    kernels_of = own.pop("kernels_of", None)
    if kernels_of is not None and ("kernels" in own or kernels_of not in cluster_names()):
        raise ClusterError(
            f"{source}: kernels_of names a cluster of the library, in place of kernels: "
            f"{', '.join(cluster_names())}"
        )
    more = own.pop("more_kernels", None)
    if more is not None and "kernels" in own:
        raise ClusterError(f"{source}: give kernels, or more_kernels beside the library's")
    if not isinstance(more, dict | None):
        raise ClusterError(f"{source}: more_kernels = {repr(more)[:40]} must be a table")
    if taken := [name for name in more or {} if name in library_kernels()]:
        raise ClusterError(
            f"{source}: more_kernels.{taken[0]} is a kernel of the library; choose another "
            "name, or describe all kernels of the file under [kernels]"
        )
    cluster = read_table(Cluster, {"kernels": more or {}, **own}, source)
    if "kernels" not in own:  # the library's were measured on Hopper GPUs
        shared = library_kernels() if kernels_of is None else load_cluster(kernels_of).kernels
        cluster = replace(cluster, kernels=shared | cluster.kernels)
    if cluster.node.ranks % cluster.network.nics:
        raise ClusterError(
            f"{source}: network.nics = {cluster.network.nics} does not divide "
            f"node.ranks = {cluster.node.ranks}; ranks share NICs in equal blocks"
        )
    for name in cluster.kernels:
        if not name.isprintable() or not name.strip():
            raise ClusterError(f"{source}: {name!r} is not the name of a kernel")
        if not any(name in cluster.passes(direction) for direction in DIRECTIONS):
            raise ClusterError(
                f"{source}: kernels.{name} has neither forward nor backward: it can do nothing"
            )
    for direction in DIRECTIONS:
        _check_kernels(cluster, direction, source)
    return cluster


def _check_kernels(cluster: Cluster, direction: str, source: str) -> None:
    """Raise unless the GPU can run every kernel as fast as its curves say, and in this direction
    every kind of call has a kernel."""
    served: set[str] = set()
    for name, rates in cluster.passes(direction).items():
        where = f"{source}: kernels.{name}.{direction}"
        for kind, rate in rates.rates.items():
            if rate.tflops > cluster.gpu.peak_tflops:
                raise ClusterError(
                    f"{where}.{kind} at {rate.tflops:g} TFLOP/s is faster than "
                    f"gpu.peak_tflops = {cluster.gpu.peak_tflops:g}"
                )
        if not rates.rates:
            raise ClusterError(f"{where} has no curve; add one, or leave the pass out")
        if rates.ranges and set(rates.rates) != {"full", "range"}:
            raise ClusterError(
                f"{where}: with ranges = true its curves must be full and range, which serves "
                f"causal calls too; there are {', '.join(rates.rates) or 'none'}"
            )
        if rates.sm_margin >= (sms := cluster.gpu.sms):
            margin = rates.sm_margin
            raise ClusterError(f"{where}.sm_margin = {margin} leaves nothing of gpu.sms = {sms}")
        served |= set(KINDS) if rates.ranges else set(rates.rates)
    if missing := [kind for kind in KINDS if kind not in served]:
        raise ClusterError(
            f"{source}: no kernel does {missing[0]} calls {direction}; add its curve to one, or a "
            "kernel with ranges = true, which does all"
        )
