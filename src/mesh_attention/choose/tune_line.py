"""The command that measures a question. `tuned.py` names it where a file of `mesh-attention tune`
lacks the answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from shlex import quote
from typing import Any

from mesh_attention.choose.scored import value_text
from mesh_attention.plan.problem.problem import Problem

_ONE_NODE = 8


def tune_line(
    problem: Problem | None, num_ranks: int | None, options: Mapping[str, Any], file: Path | str
) -> str:
    """The command that measures a question, as a person would start it. An argument that is None
    becomes a placeholder.

    >>> from mesh_attention.plan.problem.mask import Mask
    >>> problem = Problem(4096, 8, 64, num_kv_heads=2, mask=Mask(window=(128, 0)))
    >>> tune_line(problem, 4, {"tile": (2, 2), "relayout": True}, "tuned.json")
    'torchrun --nproc-per-node 4 -m mesh_attention tune --tokens 4096 --heads 8 --kv-heads 2 \
--head-dim 64 --no-causal --window 128:0 --tile 2x2 --relayout --output tuned.json'
    """
    start = f"--nproc-per-node {num_ranks}" if num_ranks and num_ranks <= _ONE_NODE else "..."
    sizes = ["--tokens N --heads N ..."] if problem is None else _problem_flags(problem)
    flags = [_flag(name, value) for name, value in options.items()]
    words = [*sizes, *flags, f"--output {quote(str(file))}"]
    return f"torchrun {start} -m mesh_attention tune {' '.join(words)}"


def _flag(name: str, value: Any) -> str:
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{flag}" if value else f"--no-{flag}"
    return f"--{flag} {value_text(value)}"


def _problem_flags(problem: Problem) -> Iterator[str]:
    """Flags that differ from the defaults of the command line."""
    yield f"--tokens {problem.q_tokens}"
    if problem.keys != problem.q_tokens:
        yield f"--kv-tokens {problem.keys}"
    yield f"--heads {problem.num_heads}"
    if problem.kv_heads != problem.num_heads:
        yield f"--kv-heads {problem.kv_heads}"
    yield f"--head-dim {problem.head_dim}"
    if problem.v_dim != problem.head_dim:
        yield f"--v-head-dim {problem.v_dim}"
    if problem.element_bytes != 2:
        yield f"--element-bytes {problem.element_bytes}"
    mask = problem.mask
    if mask.slices is not None:
        yield "--slices FILE"
        return
    if mask.causal or mask.window is not None:
        yield _flag("causal", mask.causal)
    if mask.window is not None:
        left, right = ("inf" if side is None else str(side) for side in mask.window)
        yield f"--window {left}:{right}"
    if mask.prefix:
        yield f"--prefix {mask.prefix}"
    for name, starts in (("documents", mask.documents), ("kv-documents", mask.kv_documents)):
        if starts is not None:
            yield f"--{name} {','.join(map(str, starts))}"
