"""Imports matplotlib when a picture is drawn, as it is an extra (`plots`). Charts of timelines, the
demonstration, and scripts of docs and benchmarks use it."""

from __future__ import annotations

from typing import Any

from mesh_attention.errors import MissingPackageError


def pyplot() -> Any:
    """`matplotlib.pyplot` without a screen, or an error that says what to install."""
    try:
        import matplotlib
    except ImportError:
        raise MissingPackageError("pictures need matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    return plt
