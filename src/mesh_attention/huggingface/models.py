"""The types of transformers models that are shown to have losses, logits and gradients of one
process, and those that do not.

`models.toml` is made by `tests/huggingface/model_sweep.py`, and so is the table of
`docs/models.md`.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

_TABLE = tomllib.loads(Path(__file__).with_name("models.toml").read_text())


def _by_type(section: str) -> dict[str, str]:
    return {name: text for text, names in _TABLE[section].items() for name in names}


SHOWN = _by_type("exact")  # by type, what its layers have
REFUSED = _by_type("refused")  # why: what is seen of each model anew
DIFFERENT = _by_type("different")  # why: what is not seen, so they are always refused
