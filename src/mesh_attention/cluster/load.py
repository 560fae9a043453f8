"""Clusters from TOML: those that ship with the library by name, a person's own by path.

Every field is required and nothing else is accepted, so that no constant is left to a default
nobody chose. Optional are the passes of a kernel and their curves, by what the kernel has; and
`kernels_like` takes the kernels of another cluster, so that the curves of a GPU are written once.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import is_dataclass
from difflib import get_close_matches
from importlib import resources
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

from mesh_attention.cluster.cluster import Cluster
from mesh_attention.errors import MeshAttentionError
from mesh_attention.files import FileError, read_text
from mesh_attention.plan.plan import Direction
from mesh_attention.plan.program import CallKind


class ClusterError(MeshAttentionError, ValueError):
    """A cluster that does not exist, or a description of one that does not hold together."""


_FOLDER = resources.files("mesh_attention.cluster") / "clusters"
MOST_BYTES, MOST_COLUMNS = 1 << 17, 1000
# Fields that may be zero: what does not cost anything, or does not disturb.
_MAY_BE_ZERO = ("microseconds", "half_rows", "half_columns", "slowdown", "margin")


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
    return read_cluster(table, source)


def read_cluster(table: Mapping[str, Any], source: str) -> Cluster:
    """From what TOML holds; `source` names it in errors."""
    _refuse_fields_of_old(table, source)
    table = _with_kernels(table, source)
    cluster: Cluster = _read(Cluster, table, source, ())
    if cluster.node.ranks % cluster.network.nics:
        raise ClusterError(
            f"{source}: network.nics = {cluster.network.nics} does not divide "
            f"node.ranks = {cluster.node.ranks}; ranks share NICs in equal blocks"
        )
    for name in cluster.kernels:
        if not name.isprintable() or not name.strip():
            raise ClusterError(f"{source}: {name!r} is no name of a kernel")
        if not any(name in cluster.passes(direction) for direction in Direction):
            raise ClusterError(
                f"{source}: kernels.{name} has neither forward nor backward: it can do nothing"
            )
    for direction in Direction:
        _check_kernels(cluster, direction, source)
    return cluster


_OLD = {
    ("compute",): "curves are written for each kernel: [kernels.cudnn.forward.full] and so on",
    ("disturbance", "waits_for_forward_calls"): "lets_transfers_begin in [kernels.cudnn.forward] "
    "says it for each kernel and pass",
}


def _refuse_fields_of_old(table: Mapping[str, Any], source: str) -> None:
    for path, instead in _OLD.items():
        inner: Any = table
        for name in path:
            inner = inner.get(name) if isinstance(inner, dict) else None
        if inner is not None:
            raise ClusterError(
                f"{source}: {'.'.join(path)} is a field of older files: {instead} "
                "(docs/simulate.md, or copy a file that ships with the library)"
            )


def _with_kernels(table: Mapping[str, Any], source: str) -> dict[str, Any]:
    """With the kernels of the shipped cluster that `kernels_like` names, beside the file's own."""
    own = dict(table)
    like = own.pop("kernels_like", None)
    if like is None:
        return own
    if like not in cluster_names():
        known = ", ".join(cluster_names())
        raise ClusterError(f"{source}: kernels_like = {repr(like)[:40]} must be one of {known}")
    text = (_FOLDER / f"{like}.toml").read_text(encoding="utf-8")
    kernels = own.get("kernels", {})
    if not isinstance(kernels, dict):
        raise ClusterError(f"{source}: kernels = {repr(kernels)[:40]} must be a table")
    return own | {"kernels": tomllib.loads(text).get("kernels", {}) | kernels}


def _check_kernels(cluster: Cluster, direction: Direction, source: str) -> None:
    """No kernel faster than the GPU, and for every call one that takes it."""
    there: set[CallKind] = set()
    for name, one in cluster.passes(direction).items():
        where = f"{source}: kernels.{name}.{direction}"
        for kind, rate in one.rates.items():
            if rate.tflops > cluster.gpu.peak_tflops:
                raise ClusterError(
                    f"{where}.{kind} at {rate.tflops:g} TFLOP/s is faster than "
                    f"gpu.peak_tflops = {cluster.gpu.peak_tflops:g}"
                )
        if not one.rates:
            raise ClusterError(f"{where} has no curve; add one, or leave the pass out")
        if one.ranges and set(one.rates) != {CallKind.FULL, CallKind.RANGE}:
            raise ClusterError(
                f"{where}: with ranges = true its curves must be full and range, which serves "
                f"causal calls too; there are {', '.join(one.rates) or 'none'}"
            )
        if one.sm_margin >= cluster.gpu.sms:
            raise ClusterError(
                f"{where}.sm_margin = {one.sm_margin} leaves nothing of gpu.sms = {cluster.gpu.sms}"
            )
        there |= set(CallKind) if one.ranges else set(one.rates)
    if missing := [kind for kind in CallKind if kind not in there]:
        raise ClusterError(
            f"{source}: no kernel does {missing[0]} calls {direction}; add its curve to one, or a "
            "kernel with ranges = true, which does all"
        )


def _read(kind: Any, value: Any, source: str, path: tuple[str, ...]) -> Any:
    """A value of the type that a field of the dataclasses of `cluster.py` has."""
    if isinstance(kind, type) and is_dataclass(kind):
        return kind(**_read_table(get_type_hints(kind), value, source, path))
    if get_origin(kind) is dict:  # by names that the file gives
        names = value if isinstance(value, dict) else ()
        return _read_table(dict.fromkeys(names, get_args(kind)[1]), value, source, path)
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
    needed = [name for name, kind in kinds.items() if NoneType not in get_args(kind)]
    if missing := [name for name in needed if name not in value]:
        raise ClusterError(f"{where} lacks {missing[0]!r}; its fields: {', '.join(kinds)}")
    return {
        name: _read(_what_is_there(kind), value[name], source, (*path, name))
        for name, kind in kinds.items()
        if name in value
    }


def _what_is_there(kind: Any) -> Any:
    """The type of a field that may be left out, once it is there."""
    return next((one for one in get_args(kind) if NoneType in get_args(kind)), kind)


def _why_not(kind: type, value: Any, name: str) -> str | None:
    """None if a field of this kind and name can have the value, otherwise what it must be."""
    if kind is str:
        # Names go to terminals as they are.
        is_text = isinstance(value, str) and value and value.isprintable()
        return None if is_text else "text without control characters"
    if kind is bool:
        return None if isinstance(value, bool) else "true or false"
    if isinstance(value, bool) or not isinstance(value, int | float) or not _is_usual(value):
        return "a number of usual size"
    may_be_zero = name.endswith(_MAY_BE_ZERO)
    if kind is int:
        least = 0 if may_be_zero else 1
        whole = isinstance(value, int) and value >= least
        return None if whole else f"a whole number of at least {least}"
    if value < 0 or (value == 0 and not may_be_zero):
        return "at least 0" if may_be_zero else "above 0"
    if name.endswith("slowdown") and value >= 1:
        return "below 1: it is the part of the speed that is lost"
    return None


def _is_usual(value: float) -> bool:
    """Neither NaN nor infinite, and not so large or small that results would be."""
    return value == 0 or 1e-12 < abs(value) < 1e12
