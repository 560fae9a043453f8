"""Proof of a plan by symbolic execution of all ranks' programs; it never trusts the builder.

`verify` runs every operation on labels instead of numbers: which tokens a buffer row holds, and
which (query, key) pairs a partial result has seen. See `machine.py` for what is proven.
"""

from mesh_attention.plan.read.verify.machine import verify
from mesh_attention.plan.read.verify.structure import Finding

__all__ = ["Finding", "verify"]
