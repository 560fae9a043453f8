"""What kernels say they hold during a call, against the tensors that are really alive in it."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from block_cases import Shape, full, make_block
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mesh_attention.kernels import BackwardInputs, BlockSize, Kernel
from mesh_attention.kernels.blockwise import Blockwise
from mesh_attention.kernels.reference import Reference
from mesh_attention.kernels.rows import delta
from mesh_attention.kernels.torch_ops import CpuFlash
from mesh_attention.plan.language.plan import Direction
from support.sample import sample


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes of the tensors that operations made and that are still alive: now, and at most."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.most = self._now = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if _is(x)}
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            storage = x.untyped_storage() if _is(x) else None
            if storage is None or storage.data_ptr() in tensors | self._known:
                continue
            where, size = storage.data_ptr(), storage.nbytes()
            self._known.add(where)
            self._now += size
            self.most = max(self.most, self._now)
            weakref.finalize(storage, self._freed, where, size)
        return result

    def _freed(self, where: int, size: int) -> None:
        self._known.discard(where)
        self._now -= size


def _is(x: Any) -> bool:
    return isinstance(x, Tensor)


@pytest.mark.parametrize("dtype", sample([torch.float32, torch.bfloat16], 2), ids=str)
@pytest.mark.parametrize(
    "kernel",
    [CpuFlash(), Blockwise(query_block=64, key_block=96), Blockwise(), Reference()],
    ids=["cpu_flash", "small-blocks", "blockwise", "reference"],
)
def test_a_call_holds_no_more_than_it_says_and_not_much_less(
    kernel: Kernel, dtype: torch.dtype
) -> None:
    shape = Shape(S=300, T=400, H=4, G=2, D=32, E=32, B=1)
    block = make_block(shape, dtype, full)
    size = BlockSize(300, 400, 4, 2, 32, 32, dtype.itemsize, 4)
    # Twice: while lines are counted for coverage the first call of a function holds more.
    for _ in range(2):
        with LiveBytes() as forward:
            result: Any = kernel.forward(block.of_kernel())
    out, lse = result[0].to(dtype).contiguous(), result[1].contiguous()
    inputs = BackwardInputs(block.grad_out, out, lse, delta(out, block.grad_out))
    for _ in range(2):
        result = None
        with LiveBytes() as backward:
            result = kernel.backward(block.of_kernel(), inputs)
    for direction, live in ((Direction.FORWARD, forward), (Direction.BACKWARD, backward)):
        said = kernel.scratch_bytes(direction, size)
        assert live.most <= said, direction
        assert said <= 2 * live.most, direction
