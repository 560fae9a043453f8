"""The front door: a dozen names, loaded when they are used."""

from __future__ import annotations

import subprocess
import sys

import pytest

import mesh_attention

NAMES = [
    "ContextParallel",
    "ContextParallelAttention",
    "Mask",
    "MeshAttentionError",
    "Plan",
    "Problem",
    "__version__",
    "count",
    "doctor",
    "make_plan",
    "mesh_attention",
    "plan_step",
    "register_kernel",
    "release",
    "unregister_kernel",
    "verify",
]


def test_the_public_names_are_these_and_no_others() -> None:
    assert mesh_attention.__all__ == NAMES
    assert dir(mesh_attention) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_can_be_had(name: str) -> None:
    assert getattr(mesh_attention, name) is not None


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'ring_attention'"):
        _ = mesh_attention.ring_attention


STATEMENTS = (
    "import mesh_attention",
    "from mesh_attention import Mask, Plan, Problem, count, make_plan, verify",
    "from mesh_attention import plan_step; plan_step('qwen3-0.6b', 4096, 2)",
    "import mesh_attention as m; p = m.make_plan(m.Problem(64, 2, 8), 4); m.count(p)",
)


def test_importing_and_planning_do_not_import_torch() -> None:
    """The status says which statement does, from 1 on."""
    checks = (f"{x}; 'torch' in sys.modules and sys.exit({n})" for n, x in enumerate(STATEMENTS, 1))
    code = "\n".join(("import sys", *checks))
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
