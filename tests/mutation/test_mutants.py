"""Mutants are tested, not the library that the runner itself has imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
RUN = """
import sys
from pathlib import Path
import mesh_attention.errors
from mutation.touched import start, wait_for
sys.exit(wait_for(start(Path(sys.argv[1]), ["test_changed.py"], None), 50))
"""


def test_tests_of_a_copy_import_the_library_of_the_copy(tmp_path: Path) -> None:
    package = tmp_path / "src" / "mesh_attention"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("CHANGED = True\n")
    (tmp_path / "test_changed.py").write_text(
        "import mesh_attention\ndef test_changed():\n    assert mesh_attention.CHANGED\n"
    )
    command = [sys.executable, "-c", RUN, str(tmp_path)]
    run = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, timeout=60)
    output = tmp_path / "output"
    assert run.returncode == 0, run.stderr + (output.read_text() if output.exists() else "")
