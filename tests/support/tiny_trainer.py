"""A `Trainer` of transformers on a tiny model, on one process and on ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.functional import pad
from torch.utils.data import Dataset, IterableDataset
from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

from mesh_attention.huggingface import ContextParallelTrainer
from support.tiny_models import VOCABULARY, make_model


class Texts(Dataset[dict[str, Tensor]]):
    """Of many lengths; the first tokens are a prompt, no targets."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, at: int) -> dict[str, Tensor]:
        chance = torch.Generator().manual_seed(at)
        ids = torch.randint(3, VOCABULARY, (7 + at % 5,), generator=chance)
        labels = ids.clone()
        labels[: 1 + at % 3] = -100
        return {"input_ids": ids, "labels": labels}


class Stream(IterableDataset[dict[str, Tensor]]):
    """The same without a length."""

    def __init__(self, texts: Texts) -> None:
        self.texts = texts

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return (self.texts[at] for at in range(len(self.texts)))


class SizedStream(Stream):
    """One that says a length, right or not."""

    def __init__(self, texts: Texts, length: int) -> None:
        super().__init__(texts)
        self.length = length

    def __len__(self) -> int:
        return self.length


def padded(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    most = max(len(row["input_ids"]) for row in rows)

    def joined(name: str, filled: int) -> Tensor:
        results = [pad(row[name], (0, most - len(row[name])), value=filled) for row in rows]
        return torch.stack(results)

    ids = joined("input_ids", -1)
    return {
        "input_ids": ids.clamp(min=0),
        "labels": joined("labels", -100),
        "attention_mask": (ids >= 0).long(),
    }


def packed(rows: list[dict[str, Tensor]]) -> Any:
    """One row of documents, with all that the collator of transformers says about them."""
    collate = DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    return collate([{name: x.tolist() for name, x in row.items()} for row in rows])


@dataclass(frozen=True)
class Run:
    """A training of a few steps; `batch_size` and `accumulation` are of one process."""

    model: str
    batch_size: int = 2
    collate: str = "padded"
    lora: bool = False
    num_examples: int = 13  # the last batch is half full
    num_evaluated: int = 5  # or as many as there are
    stream: bool = False
    arguments: dict[str, Any] = field(default_factory=dict)
    on_ranks: dict[str, Any] = field(default_factory=dict)  # arguments that one process lacks
    changes: dict[str, Any] = field(default_factory=dict)  # of the model's config
    loss: str | None = None  # compute_loss_func
    from_init: bool = False  # the model is made by model_init

    def trainer(
        self, folder: str, cp_size: int | None, dp_size: int = 1, *, use_cpu: bool = True
    ) -> Any:
        """`cp_size` None: that of transformers, on one process."""
        model = make_model(self.model, **self.changes)
        if self.lora:
            torch.manual_seed(1)
            names = ["q_proj", "v_proj", "lm_head"]  # whose loss is made without logits, too
            model = get_peft_model(model, LoraConfig(r=3, target_modules=names))
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if "lora_B" in name:  # 0 when it is made
                        parameter.normal_(std=0.1)
        usual: dict[str, Any] = {
            "max_steps": 3,
            "optim": "sgd",  # Adam makes steps of rounding errors where a gradient is nearly 0
            "learning_rate": 0.2,
            "max_grad_norm": 0.7,
            "logging_steps": 1,
            "save_strategy": "no",
        }
        arguments = TrainingArguments(
            folder,
            use_cpu=use_cpu,
            per_device_train_batch_size=self.batch_size // dp_size,
            per_device_eval_batch_size=self.batch_size // dp_size,
            report_to=[],
            disable_tqdm=True,
            **usual | self.arguments | (self.on_ranks if cp_size else {}),
        )
        texts = Texts(self.num_examples)
        evaluated = Texts(min(self.num_evaluated, self.num_examples))
        inputs: dict[str, Any] = {
            "train_dataset": Stream(texts) if self.stream else texts,
            "eval_dataset": Stream(evaluated) if self.stream else evaluated,
            "data_collator": globals()[self.collate],
            "compute_metrics": _metrics,
        }
        if self.loss is not None:
            inputs["compute_loss_func"] = globals()[self.loss]
        if self.from_init:
            inputs["model_init"] = lambda: make_model(self.model, **self.changes)
            model = None
        if cp_size is None:
            return Trainer(model, arguments, **inputs)
        return ContextParallelTrainer(model, arguments, cp_size=cp_size, **inputs)


def squared(outputs: Any, labels: Tensor, num_items_in_batch: Any) -> Tensor:
    """A loss of whole sequences: of logits of neighbours, wherever they are."""
    logits, targets = outputs.logits[:, :-1], labels[:, 1:]
    real = targets != -100
    chosen = logits.gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    apart = (chosen - logits.logsumexp(-1)).square() + (outputs.logits[:, 1:] - logits).mean(-1)
    loss: Tensor = (apart * real).sum() / num_items_in_batch
    return loss


def _metrics(result: Any) -> dict[str, float]:
    """They depend on which logits stand where, and on each once."""
    of_model = result.predictions  # transformers' own has router logits in it, where they are
    if isinstance(of_model, tuple):
        of_model = next(x for x in of_model if getattr(x, "ndim", 0) == 3)
    logits = torch.tensor(of_model)
    labels = torch.tensor(result.label_ids)
    weights = torch.linspace(1, 2, labels.numel()).view(labels.shape) * (labels != -100)
    return {"logits": (logits.mean(-1) * weights).sum().item(), "rows": len(logits)}


@contextmanager
def launched(rank: int, world_size: int) -> Iterator[None]:
    """What torchrun says to a process, where it says anything."""
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size}
    messages = {name: str(x) for name, x in (names | {"LOCAL_WORLD_SIZE": world_size}).items()}
    with patch.dict(os.environ, messages if world_size else {}):
        try:
            yield
        finally:
            for state in (AcceleratorState, GradientState, PartialState):
                state._reset_state()


Trained = tuple[list[dict[str, float]], dict[str, Tensor]]  # what was logged; parameters


def train(trainer: Any) -> Trained:
    """And evaluate it, before training too: that must not change how it is trained."""
    if isinstance(trainer.eval_dataset, Texts) and len(trainer.eval_dataset) < 5:
        trainer.evaluate()
    trainer.train()
    trainer.evaluate()
    names: tuple[str, ...] = ("loss", "grad_norm", "train_loss", "num_input_tokens_seen")
    names += ("eval_loss", "eval_logits", "eval_rows")
    if trainer.args.include_num_input_tokens_seen != "no":
        names += ("epoch", "total_flos")
    # The samples of a stream are counted by each process for itself.
    also = counted if isinstance(trainer.eval_dataset, Texts) else lambda _: {}
    logged = [
        {name: x for name, x in line.items() if name in names} | also(line)
        for line in trainer.state.log_history
    ]
    trained = trainer.model.named_parameters()
    return logged, {_name(n): _whole(p) for n, p in trained if p.requires_grad}


def counted(line: dict[str, float]) -> dict[str, float]:
    """What speeds count: they must be those of all samples and all steps, whatever the time."""
    speeds = {
        n: x for n, x in line.items() if n.endswith(("samples_per_second", "steps_per_second"))
    }
    return {n: round(x * line[f"{n.split('_')[0]}_runtime"]) for n, x in speeds.items()}


def _name(name: str) -> str:
    """As before it was wrapped."""
    return name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")


def _whole(parameter: Any) -> Tensor:
    x = parameter.detach()
    whole: Tensor = x.full_tensor() if isinstance(x, DTensor) else x.clone()
    return whole


def _checkpoints(use_reentrant: bool) -> dict[str, Any]:
    return {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": use_reentrant},
    }


def _fsdp2(**config: Any) -> dict[str, Any]:
    # Old versions shard layers one by one, and checkpoint them, only if they are told so here.
    is_new = hasattr(TrainingArguments, "_apply_legacy_fsdp_to_config")
    fsdp = True if is_new else "full_shard auto_wrap"
    return {"fsdp": fsdp, "fsdp_config": {"version": 2, **config}}


_TWO_BY_TWO: dict[str, Any] = {"batch_size": 4, "num_examples": 48, "num_evaluated": 4}
_COMPILED = {"torch_compile": True, "torch_compile_backend": "eager"}
_SAVED = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1, "optim": "adamw_torch"}

RUNS = {
    "windows, accumulated": Run(
        "gemma3_text",
        arguments={
            "gradient_accumulation_steps": 2,
            "max_steps": 4,
            "include_num_input_tokens_seen": "all",
        },
    ),
    "LoRA, checkpoints": Run("llama", lora=True, arguments=_checkpoints(False)),
    "packed, reentrant checkpoints": Run("qwen3", collate="packed", arguments=_checkpoints(True)),
    "data-parallel": Run(
        "mistral",
        batch_size=4,
        num_examples=12,
        num_evaluated=9,  # not divided by two data-parallel ranks
        # The last step is not logged by itself, but in the mean of all.
        arguments={"gradient_accumulation_steps": 2, "logging_steps": 2},
    ),
    "streamed": Run(  # also what is evaluated, whose last batch is not full
        "qwen3",
        batch_size=4,
        num_examples=8,
        num_evaluated=5,
        stream=True,
        arguments={"max_steps": 2},
    ),
    "an epoch": Run(
        "llama", batch_size=4, num_examples=4, arguments={"max_steps": -1, "num_train_epochs": 1}
    ),
    "saved": Run(
        "llama",
        arguments={"max_steps": 2, "save_strategy": "steps", "save_steps": 1},
        num_examples=4,
    ),
    "smoothed": Run(
        "llama",
        num_examples=4,
        arguments={"label_smoothing_factor": 0.2, "max_steps": 2},
    ),
    "rotary kernel of Liger": Run(  # the only one that knows positions, and that runs on CPUs
        "llama",
        num_examples=2,
        arguments={"max_steps": 2},
        on_ranks={
            "use_liger_kernel": True,
            "liger_kernel_config": dict.fromkeys(
                ("rms_norm", "swiglu", "fused_linear_cross_entropy"), False
            ),
        },
    ),
    # On ranks FSDP2, no batch that accelerate would fill for two data-parallel ranks.
    "tied, softcap, checkpoints of accelerate": Run(
        "gemma2",
        **_TWO_BY_TWO,
        arguments={"gradient_accumulation_steps": 2},
        on_ranks=_fsdp2(activation_checkpointing=True),
        changes={"tie_word_embeddings": True},
    ),
    "LoRA, checkpoints of transformers": Run(
        "llama",
        **_TWO_BY_TWO,
        lora=True,
        arguments=_checkpoints(False),
        on_ranks=_fsdp2(cpu_ram_efficient_loading=True),
    ),
    "own loss": Run(
        "qwen3",
        **_TWO_BY_TWO,
        loss="squared",
        arguments={"max_steps": 2, "gradient_accumulation_steps": 2},
        on_ranks=_fsdp2(),
    ),
    "model_init": Run(
        "llama", from_init=True, num_examples=4, arguments={"max_steps": 2}, on_ranks=_fsdp2()
    ),
    "bf16, noise": Run(
        "llama",
        num_examples=4,
        arguments={"bf16": True, "max_steps": 2},
        on_ranks=_fsdp2() | {"neftune_noise_alpha": 1e-3},  # too little to be seen
    ),
    "on GPUs": Run(
        "llama",
        **_TWO_BY_TWO,
        arguments={"max_steps": 5, "gradient_accumulation_steps": 2},
        on_ranks=_fsdp2(activation_checkpointing=True),
        changes={"head_dim": 16},
    ),
    "experts": Run(
        "gpt_oss",
        num_examples=8,
        arguments={"gradient_accumulation_steps": 2},
        changes={"output_router_logits": True},
    ),
    "compiled": Run("llama", on_ranks=_COMPILED),
    "compiled, FSDP2": Run("gemma2", on_ranks=_COMPILED | _fsdp2()),
    "compiled by inductor": Run(
        "llama", num_examples=2, arguments={"max_steps": 2}, on_ranks={"torch_compile": True}
    ),
    "offloaded": Run("llama", num_examples=4, on_ranks=_fsdp2(cpu_offload=True)),
    "FSDP2, whole": Run(
        "llama",
        num_examples=4,
        arguments=_SAVED,
        on_ranks=_fsdp2(state_dict_type="FULL_STATE_DICT"),
    ),
    "FSDP2, in shards": Run(
        "llama",
        lora=True,
        num_examples=4,
        arguments=_SAVED,
        on_ranks=_fsdp2(state_dict_type="SHARDED_STATE_DICT"),
    ),
}
