"""Importing `ContextParallel` is cheap: it imports this library beside torch, and little else."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import sys
import torch, torch.distributed
before = set(sys.modules)
from mesh_attention import ContextParallel, mesh_attention
new = {name.partition(".")[0]: 0 for name in set(sys.modules) - before}
for name in set(sys.modules) - before:
    new[name.partition(".")[0]] += 1
print(sorted(name for name in new if name in ("sympy", "triton", "transformers", "matplotlib")))
print(new.get("torch", 0), new["mesh_attention"])
print([name for name in ("torch._dynamo", "torch._inductor", "sympy") if name in sys.modules])
"""
MOST_MODULES = 225  # of this library: it has fewer files than that


def test_importing_the_library_imports_no_compiler_and_few_modules() -> None:
    run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    others, counts, compilers = run.stdout.splitlines()
    assert others == "[]"
    assert compilers == "[]"
    of_torch, own = map(int, counts.split())
    assert of_torch == 0
    assert own <= MOST_MODULES
