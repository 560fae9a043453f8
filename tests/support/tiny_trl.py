"""Trainers of TRL on a tiny model, on one process and on ranks."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from datasets import Dataset, disable_progress_bars, load_from_disk
from peft import LoraConfig
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerFast
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)

from mesh_attention.huggingface import trl as ours
from support.interpreted_triton import mend_bounds_of_loops
from support.tiny_models import VOCABULARY, make_model
from support.tiny_trainer import _name, _whole, counted, launched

mend_bounds_of_loops()  # in TRL's kernels
__all__ = ["RUNS", "TrlRun", "launched", "tokenizer", "train", "words"]

_TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'assistant' %}w3 {% generation %}"
    "{{ message.content }} </s>{% endgeneration %}{% else %}w4 {{ message.content }} {% endif %}"
    "{% endfor %}"
)


def tokenizer() -> PreTrainedTokenizerFast:
    named = ["<pad>", "<s>", "</s>"]
    vocabulary = {name: at for at, name in enumerate(named)}
    vocabulary |= {f"w{at}": at for at in range(len(named), VOCABULARY)}
    split = Tokenizer(WordLevel(vocabulary, unk_token="<pad>"))
    split.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=split,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        chat_template=_TEMPLATE,
    )


def words(seed: int, number: int) -> str:
    chance = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (number,), generator=chance)
    return " ".join(f"w{at}" for at in ids.tolist())


def _completed(at: int) -> dict[str, Any]:
    return {"prompt": words(at, 2 + at % 3), "completion": " " + words(99 + at, 4 + at % 5)}


def _chat(at: int) -> dict[str, Any]:
    turns = [("user", 2), ("assistant", 3 + at % 3), ("user", 3), ("assistant", 2 + at % 4)]
    return {
        "messages": [
            {"role": role, "content": words(10 * at + turn, number)}
            for turn, (role, number) in enumerate(turns)
        ]
    }


def _preferred(at: int) -> dict[str, Any]:
    sides = {"chosen": words(50 + at, 3 + at % 4), "rejected": words(70 + at, 6 - at % 3)}
    return {"prompt": words(at, 2 + at % 3)} | {name: " " + x for name, x in sides.items()}


def _asked(at: int) -> dict[str, Any]:
    return {"prompt": words(at, 3 + at % 4)}


def even_words(completions: list[str], **_: Any) -> list[float]:
    numbers = [[int(x[1:]) for x in text.split() if x[1:].isdigit()] for text in completions]
    return [sum(1.0 - x % 2 for x in of_text) / (len(of_text) + 1) for of_text in numbers]


def many_words(completions: list[str], **_: Any) -> list[float]:
    return [len({*text.split()}) / 10 for text in completions]


def first_counts(reward: Any, cp_size: int) -> Any:
    """Another reward on the other ranks of a group, which draw numbers for it."""

    @wraps(reward)
    def drawn(completions: list[str], **more: Any) -> list[float]:
        wrong = int(os.environ.get("RANK", "0")) % cp_size
        noise = torch.rand(wrong).sum().item()
        return [x + noise for x in reward(completions, **more)]

    return drawn


KINDS: dict[str, tuple[Any, Any, Any, Any]] = {
    "sft": (SFTConfig, SFTTrainer, ours.ContextParallelSFTTrainer, _completed),
    "dpo": (DPOConfig, DPOTrainer, ours.ContextParallelDPOTrainer, _preferred),
    "reward": (RewardConfig, RewardTrainer, ours.ContextParallelRewardTrainer, _preferred),
    "grpo": (GRPOConfig, GRPOTrainer, ours.ContextParallelGRPOTrainer, _asked),
}


@dataclass(frozen=True)
class TrlRun:
    """A training of a few steps; `batch_size` is of one process."""

    kind: str
    batch_size: int = 2
    model: str = "llama"
    lora: bool = False
    examples: Any = None
    num_examples: int = 8
    arguments: dict[str, Any] = field(default_factory=dict)
    on_ranks: dict[str, Any] = field(default_factory=dict)  # arguments there besides

    def trainer(self, folder: str, cp_size: int | None, dp_size: int = 1) -> Any:
        """`cp_size` None: that of TRL, on one process."""
        disable_progress_bars()
        make_config, plain, parallel, example = KINDS[self.kind]
        usual: dict[str, Any] = {
            "max_steps": 3,
            "optim": "sgd",
            "learning_rate": 0.2,
            "max_grad_norm": 0.7,
            "logging_steps": 1,
            "save_strategy": "no",
            "bf16": False,
            "gradient_checkpointing": False,
        }
        arguments = make_config(
            folder,
            use_cpu=True,
            per_device_train_batch_size=self.batch_size // dp_size,
            per_device_eval_batch_size=self.batch_size // dp_size,
            report_to=[],
            disable_tqdm=True,
            **usual | self.arguments | (self.on_ranks if cp_size else {}),
        )
        make = self.examples or example
        rows = Dataset.from_list([make(at) for at in range(self.num_examples)])
        if self.arguments.get("precompute_ref_log_probs"):
            rows = _on_disk(rows, f"{folder}/{cp_size}")
        inputs: dict[str, Any] = {"train_dataset": rows, "processing_class": tokenizer()}
        model = make_model(self.model)
        if self.kind == "reward":
            model = _with_score(model)
        if self.kind == "dpo" and not self.lora:
            inputs["ref_model"] = make_model(self.model, rms_norm_eps=0.1)  # another model
        if self.kind == "grpo":
            inputs["reward_funcs"] = [even_words, first_counts(many_words, cp_size or 1)]
            model.config._name_or_path = folder  # where the reference is read from
            if self.arguments.get("beta"):
                model.save_pretrained(folder)  # by the first rank
                _wait()
        # Two data-parallel ranks do not divide seven.
        inputs["eval_dataset"] = rows.select(range(2 if self.kind == "grpo" else 7))
        if self.lora:
            inputs["peft_config"] = LoraConfig(r=3, target_modules=["q_proj", "v_proj"])
        if cp_size is None:
            return plain(model=model, args=arguments, **inputs)
        return parallel(model=model, args=arguments, cp_size=cp_size, **inputs)


def _on_disk(rows: Dataset, folder: str) -> Any:
    """Where TRL's processes find each other's results."""
    if int(os.environ.get("RANK", "0")) == 0:
        rows.save_to_disk(folder)
    _wait()
    return load_from_disk(folder)


def _wait() -> None:
    if "RANK" in os.environ:
        dist.barrier()


def _with_score(model: Any) -> Any:
    model.config.num_labels = 1
    torch.manual_seed(2)
    scored = AutoModelForSequenceClassification.from_config(
        model.config, attn_implementation="eager"
    )
    scored.model.load_state_dict(model.model.state_dict())
    return scored


Trained = tuple[list[dict[str, float]], dict[str, Tensor]]  # what was logged; parameters
_TIMES = ("runtime", "per_second", "step_time")


def train(trainer: Any) -> Trained:
    trainer.train()
    trainer.evaluate()
    logged = [
        {name: x for name, x in line.items() if not any(time in name for time in _TIMES)}
        | counted(line)
        for line in trainer.state.log_history
    ]
    texts = getattr(trainer, "_logs", {})  # of GRPO: what its tables show
    logged.append({name: len(texts[name]) for name in ("prompt", "completion") if texts})
    parameters = trainer.model.named_parameters()
    return logged, {_name(n): _whole(p) for n, p in parameters if p.requires_grad}


_POLICY: dict[str, Any] = {
    "num_generations": 2,
    # Some completions end early.
    "generation_kwargs": {"sequence_bias": [[[2], 3.0]]},
    "max_completion_length": 7,
    "beta": 0.1,
    "steps_per_generation": 2,
    "num_iterations": 2,
    "max_steps": 5,
    "learning_rate": 0.05,
}
_FSDP2 = {"fsdp": True, "fsdp_config": {"version": 2}}
RUNS = {
    "completions, padded": TrlRun(
        "sft", arguments={"gradient_accumulation_steps": 2, "gradient_checkpointing": True}
    ),
    "completions, packed": TrlRun(
        "sft",
        model="qwen3",
        arguments={"packing": True, "max_length": 24, "eval_packing": False},
    ),
    "wrapped": TrlRun(
        "sft",
        model="mistral",
        arguments={
            "packing": True,
            "packing_strategy": "wrapped",
            "max_length": 16,
            "completion_only_loss": False,
        },
    ),
    "padding-free": TrlRun(
        "sft", arguments={"padding_free": True, "max_length": None, "loss_type": "dft"}
    ),
    "assistant only, adapters": TrlRun(
        "sft", lora=True, examples=_chat, arguments={"assistant_only_loss": True}
    ),
    "preferences": TrlRun("dpo", arguments={"gradient_accumulation_steps": 2}),
    "preferences, precomputed": TrlRun("dpo", arguments={"precompute_ref_log_probs": True}),
    "preferences, adapters": TrlRun("dpo", lora=True, arguments={"loss_type": ["ipo", "sft"]}),
    "sharded completions": TrlRun("sft", on_ranks=_FSDP2),
    "sharded preferences": TrlRun("dpo", lora=True, on_ranks=_FSDP2),
    "sharded preferences, reference": TrlRun("dpo", on_ranks=_FSDP2),
    "sharded scores": TrlRun("reward", on_ranks=_FSDP2),
    "scores": TrlRun("reward", arguments={"center_rewards_coefficient": 0.01}),
    "policy": TrlRun("grpo", batch_size=4, arguments=_POLICY),
    "sharded policy": TrlRun(  # of one generation: with FSDP2 the next one draws other tokens
        "grpo", batch_size=4, arguments=_POLICY | {"max_steps": 4}, on_ranks=_FSDP2
    ),
}
