"""Why a host has no shared memory, in one line with the way out."""

from __future__ import annotations

from mesh_attention.runtime.transport.shared_memory import _in_short


def test_the_reason_is_the_first_line_of_the_error_or_its_type() -> None:
    assert _in_short("no memory", RuntimeError("full\nat 0x12")) == "no memory (full)"
    assert _in_short("no memory", MemoryError()) == "no memory (MemoryError)"


def test_ranks_that_share_a_gpu_are_told_what_lets_them() -> None:
    told = _in_short("no memory", RuntimeError("overlapping devices are not allowed"))
    assert told == (
        "no memory (overlapping devices are not allowed); "
        "ranks that share a GPU need TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1"
    )
