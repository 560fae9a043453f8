"""`docs/huggingface.md` has the models that tests show, and its names are loaded when used."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mesh_attention import MeshAttentionError, huggingface
from mesh_attention.huggingface.models import SHOWN

PAGE = (Path(__file__).parents[2] / "docs" / "huggingface.md").read_text()


def test_the_table_of_models_is_the_one_that_tests_run() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("| `") and line.count("|") == 3]
    kept = [row for row in rows if row.split("`")[1] != "model_type"]
    assert kept == [f"| `{name}` | {about} |" for name, about in SHOWN.items()]


def test_importing_the_package_imports_neither_transformers_nor_torch() -> None:
    """Need 15: nothing breaks where transformers is not there."""
    script = (
        "import sys, mesh_attention.huggingface as h; dir(h); "
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'accelerate')))"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_without_transformers_names_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("attention", "model", "trainer"):
        monkeypatch.delitem(sys.modules, f"mesh_attention.huggingface.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "transformers", None)
    for name in ("register", "ModelContextParallel"):
        with pytest.raises(MeshAttentionError, match=r"mesh-attention\[huggingface\]"):
            getattr(huggingface, name)
    with pytest.raises(AttributeError, match="no attribute 'attend'"):
        huggingface.attend  # noqa: B018
