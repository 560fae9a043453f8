"""Campaigns against the library: slow, by seed, and able to fail (`run.py`, `make hostile`)."""

import sys
from pathlib import Path

# Campaigns reuse what tests of plans and methods draw; pytest would add these folders by itself.
for _folder in ("plan", "methods"):
    _path = str(Path(__file__).parents[1] / _folder)
    if _path not in sys.path:
        sys.path.append(_path)
