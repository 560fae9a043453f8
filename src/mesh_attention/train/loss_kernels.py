"""Which kernel makes losses, and the gradient of logits, from the logits of a chunk: that of Liger
(the extra `liger`) where it is installed and can, otherwise PyTorch's operators.

Of Liger only the kernel of a chunk is taken, which writes gradients over logits in the dtype of
products: chunks have four times the tokens in the same memory. Its own function of a whole head
waits for the host, and scales saved gradients in place, so that a second backward pass is wrong.
"""

from __future__ import annotations

from functools import cache
from typing import Literal, get_args

import torch
from torch import Tensor

from mesh_attention.errors import MeshAttentionError
from mesh_attention.kernels.ready_made import PackageFunction
from mesh_attention.kernels.registry import KernelRefusedError
from mesh_attention.train.chunked_logits import Factors, Head
from mesh_attention.train.token_losses import Loss

LossKernel = Literal["liger", "plain"]
Reasons = tuple[tuple[str, str], ...]  # (name, why not, or "chosen"), in the order asked

_IGNORED = -1
# Sums are divided by nothing, and only losses are returned.
_ALWAYS = {
    "ce_weight": None,
    "ignore_index": _IGNORED,
    "reduction": "sum",
    "n_non_ignore": 1,
    "sum_non_ignore_weight": 1.0,
    "weight_sum": 0.0,
    "return_z_loss": False,
    "return_token_accuracy": False,
    "return_predicted_tokens": False,
}
_OF_CHUNK = ("logits_chunk", "target_chunk", "lse_square_scale", "label_smoothing", "softcap")
_LIGER = PackageFunction(
    "liger_kernel.ops.backends._triton.cross_entropy",
    "cross_entropy_loss_and_grad_triton",
    (*_OF_CHUNK, "has_gradients", *_ALWAYS),
)


def choose_loss(
    kernel: LossKernel | None, head: Head, factors: Factors, label_smoothing: float, z_loss: float
) -> tuple[Loss, Reasons]:
    """The one that is called `kernel`, or the first that can."""
    names = get_args(LossKernel)
    if kernel is not None and kernel not in names:
        raise MeshAttentionError(f"kernel={kernel!r}: must be {' or '.join(names)}, or None")
    if kernel == "plain":
        return Loss(label_smoothing, z_loss), (("plain", "chosen"),)
    device, low_rank = factors.x.device, factors.few is not None
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    why_not = why_not_liger(device.type, capability, head.dtype, low_rank)
    if why_not is None:
        return LigerLoss(label_smoothing, z_loss), (("liger", "chosen"),)
    if kernel is not None:
        raise KernelRefusedError(f"kernel='liger' cannot make this loss: {why_not}")
    return Loss(label_smoothing, z_loss), (("liger", why_not), ("plain", "chosen"))


class LigerLoss(Loss):
    def logit_bytes(self, head: Head) -> int:
        return head.dtype.itemsize

    def of_chunk(
        self, head: Head, rows: Factors, tokens: Tensor, ignored: Tensor, needs_grad: bool
    ) -> tuple[Tensor, Tensor | None]:
        logits = head.from_matrix(rows, head.dtype)
        if rows.weight is None:  # the caller's
            logits = logits.clone(memory_format=torch.contiguous_format)
        logits.gather(-1, tokens[:, None])  # refuses what is no token: the kernel would write there
        targets = tokens.masked_fill(ignored, _IGNORED)
        with torch.cuda.device_of(logits):  # type: ignore[no-untyped-call]
            settings = self.z_loss, self.label_smoothing, head.softcap
            results = _LIGER(logits, targets, *settings, needs_grad, *_ALWAYS.values())
        return results[0], results[-1] if needs_grad else None


def why_not_liger(
    device_type: str, capability: tuple[int, int] | None, dtype: torch.dtype, low_rank: bool
) -> str | None:
    """None if it can; `capability` of a CUDA device, `dtype` of products."""
    if device_type != "cuda" or capability is None:
        return f"runs on cuda, not on {device_type}"
    if capability < (8, 0):
        return f"needs compute capability 8.0, found {capability}"
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"takes float32, bfloat16 and float16, not {dtype}"
    if low_rank and dtype != torch.float32:
        return f"takes logits in {dtype}, where the product of low_rank is added in float32"
    return _why_not_installed()


@cache
def _why_not_installed() -> str | None:
    return _LIGER.why_unusable()
