"""Small random models of transformers, and batches for them, on one process and on ranks.

The pool imports this module before it starts its processes, so it imports all that they need.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM

from mesh_attention.huggingface import ModelContextParallel

VOCABULARY = 61
_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 36,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,  # attention that is far from even
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MIXED = ["sliding_attention", "full_attention"]
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "mistral": {"sliding_window": 5},
    "gemma2": {
        "sliding_window": 6,
        "layer_types": _MIXED,
        "attn_logit_softcapping": 2.0,
        "query_pre_attn_scalar": 12,
    },
    "gemma3_text": {
        "num_hidden_layers": 3,
        "sliding_window": 7,
        "layer_types": ["sliding_attention", *_MIXED],
        "query_pre_attn_scalar": 10,
    },
    "gpt_oss": {
        "initializer_range": 0.1,  # what its experts multiply makes float32 less exact
        "sliding_window": 4,
        "layer_types": _MIXED,
        "num_local_experts": 3,
        "num_experts_per_tok": 2,
    },
}


def make_model(name: str, attention: str = "eager", **changes: Any) -> Any:
    """The same parameters every time, none of them where they begin in silence (at 0 or 1)."""
    config = AutoConfig.for_model(name, **_COMMON | CONFIGS[name] | changes)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


@dataclass(frozen=True)
class Batch:
    """`inputs` is what both the model of one process and `shard_batch` take besides ids and labels;
    `unseen` tokens are padding or begin a document: no targets."""

    shape: tuple[int, int]
    inputs: dict[str, Tensor] = field(default_factory=dict)
    unseen: Tensor | None = None

    @property
    def whole(self) -> dict[str, Any]:
        chance = torch.Generator().manual_seed(self.shape[0] + self.shape[1])
        ids = torch.randint(3, VOCABULARY, self.shape, generator=chance)
        labels = ids.clone()
        labels[:, 3:5] = -100
        if self.unseen is not None:
            labels[self.unseen] = -100
        return {"input_ids": ids, "labels": labels, **self.inputs}

    @property
    def real(self) -> Tensor:
        return self.inputs.get("attention_mask", torch.ones(self.shape)).bool()


def _padded(mask: Tensor) -> Batch:
    """The first token is no target: a language model of one process would ask padding for it."""
    first = mask.int().argmax(1, keepdim=True)
    unseen = ~mask | (torch.arange(mask.shape[1]) == first)
    return Batch((mask.shape[0], mask.shape[1]), {"attention_mask": mask.long()}, unseen)


PLAIN = Batch((2, 19))
RIGHT = _padded(torch.arange(21) < torch.tensor([[21], [13]]))
LEFT = _padded(torch.arange(17) >= torch.tensor([[0], [6], [3]]))
_POSITIONS = torch.tensor([[*range(9), 0, *range(13)]])
PACKED = Batch((1, 23), {"position_ids": _POSITIONS}, _POSITIONS == 0)
ALL = [PLAIN, RIGHT, LEFT, PACKED]


def on_one_process(model: Any, batch: Batch, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Loss and logits as transformers have them; of packed documents each by itself, since not all
    models of transformers keep them apart (gpt-oss does not)."""
    whole = {name: x.to(device) for name, x in batch.whole.items()}
    positions = whole.get("position_ids")
    if positions is None:
        out = model(**whole, use_cache=False)
        return out.loss, out.logits
    starts = [*torch.nonzero(positions[0] == 0).flatten().tolist(), positions.shape[1]]
    parts = [whole["input_ids"][:, a:b] for a, b in pairwise(starts)]
    logits = torch.cat([model(part, use_cache=False).logits for part in parts], dim=1)
    return cross_entropy(logits[0, :-1], whole["labels"][0, 1:]), logits


def on_ranks(cp: ModelContextParallel, model: Any, batch: Batch) -> tuple[Any, Tensor]:
    part = cp.shard_batch(**batch.whole)
    logits = model(**part.model_inputs()).logits
    mean = cp.cross_entropy(logits, part.labels, reduce="sum")
    return mean, cp.unshard(logits.detach(), 1, documents=part.documents)
