"""The large plan of which scripts look at one rank, as options."""

from __future__ import annotations

import argparse

__all__ = ["add_tile_options"]


def add_tile_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, default=524288)
    parser.add_argument("--ranks", type=int, default=256)
    parser.add_argument("--tile", type=int, nargs=2, default=(16, 16))
    parser.add_argument("--heads", type=int, default=64)
    parser.add_argument("--head-dim", type=int, default=128)
