"""`mesh-attention selftest`: is attention exact on this computer? Under a minute, without a GPU.

Every method runs on four processes, forward and backward, and every kernel of this computer on one
block; all are held against float64 attention (`measure/exactness.py`). Exit code 1: one is wrong.
"""

from __future__ import annotations

import argparse
import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mesh_attention.cli.command import Command, Flag
from mesh_attention.cli.local_ranks import local_ranks
from mesh_attention.cli.output import show, table
from mesh_attention.cli.values import one_of
from mesh_attention.errors import MeshAttentionError
from mesh_attention.plan.methods.table import AUTO, METHODS
from mesh_attention.plan.problem.mask import Mask
from mesh_attention.version import __version__

if TYPE_CHECKING:
    from mesh_attention.measure.exactness import KernelCheck

NUM_RANKS = 4
TOLERANCE = 1e-10
# Every method under a causal mask; the other masks by what is chosen for them.
_MASKS = {
    "full": Mask(),
    "window": Mask(causal=True, window=(40, 0)),
    "documents": Mask(causal=True, documents=(0, 11, 90, 203)),
}


@dataclass(frozen=True, slots=True)
class MethodCheck:
    method: str
    mask: str
    output_error: float
    gradient_error: float
    failure: str = ""  # what a rank raised

    @property
    def ok(self) -> bool:
        return all(error <= TOLERANCE for error in (self.output_error, self.gradient_error))

    def to_json(self) -> dict[str, Any]:
        errors = {"output_error": self.output_error, "gradient_error": self.gradient_error}
        known = {name: None if math.isnan(x) else x for name, x in errors.items()}  # JSON has none
        failure = {"failure": self.failure} if self.failure else {}
        return {"method": self.method, "mask": self.mask, "ok": self.ok, **known, **failure}


def run(args: argparse.Namespace) -> int:
    begin = time.monotonic()
    methods = [args.method] if args.method else [*METHODS]
    cases = [(name, "causal", Mask(causal=True)) for name in methods]
    cases += [] if args.method else [(AUTO, name, mask) for name, mask in _MASKS.items()]
    checks = _check_methods(cases)
    kernels, device = _check_kernels()
    ok = len(checks) == len(cases) and all(check.ok for check in checks)
    ok = ok and all(check.ok for check in kernels)
    seconds = time.monotonic() - begin
    return show(
        args,
        lambda: {
            "ok": ok,
            "version": __version__,
            "seconds": seconds,
            "ranks": NUM_RANKS,
            "gpu": device,
            "methods": [check.to_json() for check in checks],
            "kernels": [check.to_json() for check in kernels],
        },
        lambda: [
            *_methods_lines(checks),
            *_kernels_lines(kernels, device),
            f"{'ok' if ok else 'WRONG'}: mesh-attention {__version__}, "
            f"{len(checks) + len(kernels)} checks in {seconds:.0f} s",
        ],
        ok=ok,
    )


def _check_methods(cases: list[tuple[str, str, Mask]]) -> list[MethodCheck]:
    """Runs the cases up to the first that raises: its ranks are gone, and the others do not run."""
    checks: list[MethodCheck] = []
    with local_ranks(NUM_RANKS, len(cases)) as check:
        for name, mask_name, mask in cases:
            try:
                checked = check(f"{name}, {mask_name}", mask, {"method": name})
                errors = (checked.output_error, checked.gradient_error)
                checks.append(MethodCheck(name, mask_name, *errors))
            except MeshAttentionError as error:
                lines = str(error).strip().splitlines()
                checks.append(MethodCheck(name, mask_name, math.nan, math.nan, lines[-1]))
                break
    return checks


def _check_kernels() -> tuple[list[KernelCheck], str | None]:
    """Checks all kernels of the CPU and of the first GPU, and returns the name of that GPU too."""
    import torch

    from mesh_attention.measure.exactness import kernel_checks

    checks = kernel_checks("cpu")
    if not torch.cuda.is_available():
        return checks, None
    return [*checks, *kernel_checks("cuda")], torch.cuda.get_device_name(0)


def _methods_lines(checks: list[MethodCheck]) -> list[str]:
    rows = [("method", "mask", "error", "of gradients", "")]
    for check in checks:
        errors = (f"{check.output_error:.1e}", f"{check.gradient_error:.1e}")
        word = "ok" if check.ok else f"WRONG {check.failure}"
        rows += [(check.method, check.mask, *errors, word)]
    return [f"{NUM_RANKS} processes, float64, forward and backward", table(rows), ""]


def _kernels_lines(checks: list[KernelCheck], device: str | None) -> list[str]:
    rows = [("kernel", "on", "error", "of gradients", "")]
    for check in checks:
        if check.errors is not None:
            errors = (f"{check.errors.output:.1e}", f"{check.errors.gradients:.1e}")
            word = "ok" if check.ok else f"WRONG in {check.note}"
            rows.append((check.kernel, check.device, *errors, word))
    lines = [f"kernels on {'the CPU' if device is None else f'the CPU and {device}'}", table(rows)]
    for check in checks:
        if check.install is not None:
            lines.append(f"not installed: {check.kernel}; pip install {check.install}")
        elif check.errors is None:
            lines.append(f"not used here: {check.kernel} on {check.device}: {check.note}")
    if device is None:
        lines.append("No GPU was found, so the kernels of GPUs were not checked.")
    return [*lines, ""]


COMMAND = Command(
    summary="is attention exact here? every method on four processes, every kernel; under a minute",
    run=run,
    flags=(Flag("--method", "this method only (default: all)", one_of("method", METHODS), "NAME"),),
    examples=("mesh-attention selftest", "mesh-attention selftest --method mesh --json"),
)
