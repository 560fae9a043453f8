"""Fine-tuning with the Trainer of transformers, each sequence on several ranks.

    python examples/finetune_hf.py
    python examples/finetune_hf.py --cp 4 --lora --checkpointing
    torchrun --nproc-per-node 8 examples/finetune_hf.py --cp 4 --tokens 4096
    srun --nodes 2 --ntasks-per-node 1 torchrun --nnodes 2 --nproc-per-node 8 \
        --rdzv-backend c10d --rdzv-endpoint $(hostname):29500 examples/finetune_hf.py --cp 16

A small random Qwen3 learns the bytes of this file, in texts of many lengths. Without torchrun it
starts four ranks over gloo itself. For a model of your own replace `make_model` and the data: what
makes it context parallel is `ContextParallelTrainer` in place of `Trainer`, and `cp_size`.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import Qwen3Config, Qwen3ForCausalLM, TrainingArguments

from mesh_attention.huggingface import ContextParallelTrainer

VOCABULARY = 256  # bytes


def make_model(lora: bool) -> Any:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
    )
    model = Qwen3ForCausalLM(config)
    if lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear"))
    return model


def texts(tokens: int) -> list[Tensor]:
    """Pieces of this file, some shorter than others."""
    whole = torch.tensor(list(Path(__file__).read_bytes()))
    return [piece[: tokens - 37 * (at % 4)] for at, piece in enumerate(whole.split(tokens)[:-1])]


def padded(rows: list[Tensor]) -> dict[str, Tensor]:
    """A batch as tokenizers and collators of transformers give it."""
    real = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    return {
        "input_ids": pad_sequence(rows, batch_first=True),
        "labels": pad_sequence(rows, batch_first=True, padding_value=-100),
        "attention_mask": real,
    }


def read(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Fine-tune a small model on context-parallel ranks."
    )
    parser.add_argument("--ranks", type=int, default=4, help="without torchrun")
    parser.add_argument("--cp", type=int, default=2, help="ranks that share a sequence")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=512, help="of a text at most")
    parser.add_argument("--lora", action="store_true", help="train adapters alone (needs peft)")
    parser.add_argument("--checkpointing", action="store_true", help="save memory of activations")
    parser.add_argument("--output", help="a folder for the model")
    args = parser.parse_args(arguments)
    for name in ("ranks", "cp", "steps"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} {getattr(args, name)}: must be 1 or more")
    ranks = int(os.environ.get("WORLD_SIZE", args.ranks))
    if ranks % args.cp:
        parser.error(f"--cp {args.cp} does not divide {ranks} ranks")
    most = len(Path(__file__).read_bytes()) - 1
    if not 128 <= args.tokens <= most:
        parser.error(f"--tokens {args.tokens}: this file has texts of 128 to {most} bytes")
    return args


def main(arguments: Sequence[str] | None = None) -> None:
    args = read(arguments)
    if "RANK" not in os.environ:
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={args.ranks}"]
        own_arguments = sys.argv[1:] if arguments is None else arguments
        environment = {"OMP_NUM_THREADS": "1"} | os.environ
        command = [sys.executable, *torchrun, __file__, *own_arguments]
        raise SystemExit(subprocess.call(command, env=environment))
    # A GPU for each process, or none at all.
    gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    with tempfile.TemporaryDirectory() as folder:
        training = TrainingArguments(
            args.output or folder,
            use_cpu=not gpu,
            bf16=gpu,
            max_steps=args.steps,
            per_device_train_batch_size=2,
            per_device_eval_batch_size=2,
            gradient_accumulation_steps=2,
            gradient_checkpointing=args.checkpointing,
            ddp_find_unused_parameters=False,
            learning_rate=5e-3,
            logging_steps=5,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        data: Any = texts(args.tokens)
        trainer = ContextParallelTrainer(
            *(make_model(args.lora), training),
            train_dataset=data,
            eval_dataset=data,
            data_collator=padded,
            cp_size=args.cp,
        )
        before = trainer.evaluate()["eval_loss"]
        trainer.train()
        after = trainer.evaluate()["eval_loss"]
        if trainer.is_world_process_zero():
            dp, cp = trainer.mesh.shape
            print(f"{dp} data-parallel by {cp} context-parallel ranks, {args.steps} steps")
            print(f"loss of all texts {before:.5f} before, {after:.5f} after")
        if args.output:
            trainer.save_model()  # by one rank
        trainer.close()  # the model attends by itself again
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
