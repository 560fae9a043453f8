"""Clusters from TOML: those that ship with the library by name, a person's own by path.

Every field is required and nothing else is accepted, so that no constant is left to a default
nobody chose.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import is_dataclass
from difflib import get_close_matches
from importlib import resources
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from mesh_attention.cluster.cluster import Cluster
from mesh_attention.errors import MeshAttentionError
from mesh_attention.files import FileError, read_text
from mesh_attention.plan.program import CallKind


class ClusterError(MeshAttentionError, ValueError):
    """A cluster that does not exist, or a description of one that does not hold together."""


_FOLDER = resources.files("mesh_attention.cluster") / "clusters"
MOST_BYTES, MOST_COLUMNS = 1 << 17, 1000
# Fields that may be zero: what does not cost anything, or does not disturb.
_MAY_BE_ZERO = ("microseconds", "half_rows", "half_columns", "slowdown")


def cluster_names() -> tuple[str, ...]:
    files = (entry.name for entry in _FOLDER.iterdir())
    return tuple(sorted(name.removesuffix(".toml") for name in files if name.endswith(".toml")))


def load_cluster(name_or_file: str | Path) -> Cluster:
    """
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
        close = get_close_matches(name, cluster_names(), n=1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        raise ClusterError(
            f"no cluster {name[:100]!r}{hint}: it is neither a file nor one of "
            f"{', '.join(cluster_names())}"
        )
    try:
        text = read_text(path, most_bytes=MOST_BYTES)
    except FileError as error:
        raise ClusterError(str(error)) from error
    return parse_cluster(text, str(path))


def a_cluster(value: Any) -> Cluster:
    """What was given where a cluster is wanted: one, or the name or file of one."""
    return value if isinstance(value, Cluster) else load_cluster(value)


def parse_cluster(text: str, source: str) -> Cluster:
    if not isinstance(text, str):
        raise ClusterError(f"{source}: {type(text).__name__} is not text")
    # A key of many thousand parts takes tomllib minutes, and what reads it more depth than it has.
    if len(text) > MOST_BYTES or max(map(len, text.splitlines()), default=0) > MOST_COLUMNS:
        raise ClusterError(
            f"{source} is not the description of a cluster: it has more than {MOST_BYTES} "
            f"characters, or a line of more than {MOST_COLUMNS}"
        )
    try:
        table = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ClusterError(f"{source} is not TOML: {error}") from error
    cluster: Cluster = _read(Cluster, table, source, ())
    if cluster.node.ranks % cluster.network.nics:
        raise ClusterError(
            f"{source}: network.nics = {cluster.network.nics} does not divide "
            f"node.ranks = {cluster.node.ranks}; ranks share NICs in equal blocks"
        )
    for one in (cluster.compute.forward, cluster.compute.backward):
        for kind, rate in one.items():
            if rate.tflops > cluster.gpu.peak_tflops:
                raise ClusterError(
                    f"{source}: {kind} kernels at {rate.tflops:g} TFLOP/s are faster than "
                    f"gpu.peak_tflops = {cluster.gpu.peak_tflops:g}"
                )
    return cluster


def _read(kind: Any, value: Any, source: str, path: tuple[str, ...]) -> Any:
    """A value of the type that a field of the dataclasses of `cluster.py` has."""
    if isinstance(kind, type) and is_dataclass(kind):
        return kind(**_read_table(get_type_hints(kind), value, source, path))
    if get_origin(kind) is dict:
        table = _read_table(dict.fromkeys(CallKind, get_args(kind)[1]), value, source, path)
        return {CallKind(name): entry for name, entry in table.items()}
    why_not = _why_not(kind, value, path[-1])
    if why_not is not None:
        raise ClusterError(f"{source}: {'.'.join(path)} = {repr(value)[:40]} must be {why_not}")
    return kind(value)


def _read_table(
    kinds: Mapping[str, Any], value: Any, source: str, path: tuple[str, ...]
) -> dict[str, Any]:
    where = f"{source}: {'.'.join(path) or 'the file'}"
    if not isinstance(value, dict):
        raise ClusterError(f"{where} = {repr(value)[:40]} must be a table")
    if unknown := [name for name in value if name not in kinds]:
        raise ClusterError(f"{where} has no field {unknown[0]!r}; its fields: {', '.join(kinds)}")
    if missing := [name for name in kinds if name not in value]:
        raise ClusterError(f"{where} lacks {missing[0]!r}; its fields: {', '.join(kinds)}")
    return {name: _read(kind, value[name], source, (*path, name)) for name, kind in kinds.items()}


def _why_not(kind: type, value: Any, name: str) -> str | None:
    """None if a field of this kind and name can have the value, otherwise what it must be."""
    if kind is str:
        return None if isinstance(value, str) and value else "text"
    if kind is bool:
        return None if isinstance(value, bool) else "true or false"
    if isinstance(value, bool) or not isinstance(value, int | float) or not _is_usual(value):
        return "a number of usual size"
    if kind is int:
        whole = isinstance(value, int) and value >= 1
        return None if whole else "a whole number of at least 1"
    may_be_zero = name.endswith(_MAY_BE_ZERO)
    if value < 0 or (value == 0 and not may_be_zero):
        return "at least 0" if may_be_zero else "above 0"
    if name.endswith("slowdown") and value >= 1:
        return "below 1: it is the part of the speed that is lost"
    return None


def _is_usual(value: float) -> bool:
    """Neither NaN nor infinite, and not so large or small that results would be."""
    return value == 0 or 1e-12 < abs(value) < 1e12
