"""Versions of packages whose inner parts are relied on: what was tested, and what is not."""

from __future__ import annotations

from importlib.metadata import version

from transformers.utils import logging

from mesh_attention.errors import MeshAttentionError

TESTED = {"accelerate": ((1, 13), (1, 15)), "trl": ((1, 15), (1, 16))}


def check_version(package: str) -> None:
    """Older ones lack what is needed, and are refused. Newer ones may have changed it: one line of
    warning."""
    oldest, newest = TESTED[package]
    installed = version(package)
    number = tuple(int(x) for x in installed.split(".")[:2])
    tested = "tested are {}.{} to {}.{}".format(*oldest, *newest)
    tested += f": pip install '{package}>={oldest[0]}.{oldest[1]},<{newest[0]}.{newest[1] + 1}'"
    if number < oldest:
        raise MeshAttentionError(f"{package} {installed} is too old; {tested}")
    if number > newest:
        logging.get_logger(__name__).warning_once(
            f"{package} {installed} is new here, and inner parts of it are relied on; {tested}, or "
            "compare with one process (mesh_attention.doctor)"
        )
