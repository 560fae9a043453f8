"""Which kernel makes losses, and the gradient of logits, from the logits of a chunk: that of Liger
(the extra `liger`) where it is installed and can, otherwise PyTorch's operators.

Of Liger only the kernel of a chunk is taken. It reads logits in the dtype of products, twice, and
writes their gradient over them, where PyTorch's operators hold them twice in float32: chunks have
four times the tokens in the same memory. Liger's own function of a whole head waits for the host
in both passes, and scales the gradients that it saved in place, so that a second backward pass is
wrong.
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

_LIGER = PackageFunction(
    "liger_kernel.ops.backends._triton.cross_entropy",
    "cross_entropy_loss_and_grad_triton",
    (
        *("logits_chunk", "target_chunk", "ce_weight", "ignore_index", "lse_square_scale"),
        *("label_smoothing", "reduction", "softcap", "n_non_ignore", "sum_non_ignore_weight"),
        *("weight_sum", "return_z_loss", "return_token_accuracy", "return_predicted_tokens"),
        "has_gradients",
    ),
)
_IGNORED = -1
_OF_MEANS = (1, 1.0, 0.0)  # numbers and weights of targets, by which no sum is divided
_NOTHING_ELSE = (False, False, False)  # besides losses


def choose_loss(
    kernel: LossKernel | None, head: Head, factors: Factors, label_smoothing: float, z_loss: float
) -> tuple[Loss, Reasons]:
    """The one that is called `kernel`, or the first that can."""
    names = get_args(LossKernel)
    if kernel is not None and kernel not in names:
        raise MeshAttentionError(f"kernel={kernel!r}: must be {' or '.join(names)}, or None")
    if kernel == "plain":
        return Loss(label_smoothing, z_loss), (("plain", "chosen"),)
    why_not = _why_not_liger(head, factors)
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
            losses, *_, of_logits = _LIGER(
                *(logits, targets, None, _IGNORED, self.z_loss, self.label_smoothing, "sum"),
                *(head.softcap, *_OF_MEANS, *_NOTHING_ELSE, needs_grad),
            )
        return losses, of_logits if needs_grad else None


def _why_not_liger(head: Head, factors: Factors) -> str | None:
    device, dtype = factors.x.device, head.dtype
    if device.type != "cuda":
        return f"runs on cuda, not on {device.type}"
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"takes float32, bfloat16 and float16, not {dtype}"
    if (capability := torch.cuda.get_device_capability(device)) < (8, 0):
        return f"needs compute capability 8.0, found {capability}"
    if factors.few is not None and dtype != torch.float32:
        return f"has logits in {dtype}, where those of low_rank are added in float32"
    return _why_not_installed()


@cache
def _why_not_installed() -> str | None:
    return _LIGER.why_unusable()
