"""Supervised fine-tuning of a causal model: FSDP2 shards it, and ranks share each sequence.

    python examples/sft_fsdp2.py
    torchrun --nproc-per-node 8 examples/sft_fsdp2.py --cp 8 --model Qwen/Qwen3-8B --data it.jsonl
    srun --nodes 2 --ntasks-per-node 1 torchrun --nnodes 2 --nproc-per-node 8 \
        --rdzv-backend c10d --rdzv-endpoint $(hostname):29500 examples/sft_fsdp2.py --cp 16

Lines of the data are objects with "prompt" and "completion", and only completions are learned.
Without `--model` a small random Qwen3 learns to add numbers, by bytes; without torchrun two ranks
over gloo are started. Layers are checkpointed and keep the results of attention, so that nothing of
it is communicated twice; losses are made in the head, so that there are no logits.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Qwen3Config,
    Qwen3ForCausalLM,
    TrainingArguments,
)

from mesh_attention.huggingface import ContextParallelTrainer

Row = dict[str, Tensor]


def model_and_tokens(name: str | None) -> tuple[Any, Callable[[str], list[int]]]:
    if name is not None:
        tokenizer = AutoTokenizer.from_pretrained(name)
        model = AutoModelForCausalLM.from_pretrained(name)
        return model, lambda text: list(tokenizer.encode(text, add_special_tokens=False))
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
    )
    return Qwen3ForCausalLM(config), lambda text: list(text.encode())


def chats(path: str | None) -> list[dict[str, str]]:
    if path is not None:
        return [json.loads(line) for line in Path(path).read_text().splitlines()]
    pairs = [(a, b) for a in range(1, 9) for b in range(1, 9)]
    return [{"prompt": f"What is {a} + {b}? ", "completion": f"It is {a + b}.\n"} for a, b in pairs]


def row(chat: dict[str, str], tokens: Callable[[str], list[int]], most: int) -> Row:
    prompt, completion = tokens(chat["prompt"]), tokens(chat["completion"])
    ids = torch.tensor(prompt + completion)[:most]
    labels = ids.clone()
    labels[: len(prompt)] = -100
    return {"input_ids": ids, "labels": labels}


def collate(rows: list[Row]) -> Row:
    def joined(name: str, filled: int) -> Tensor:
        return pad_sequence([x[name] for x in rows], batch_first=True, padding_value=filled)

    ids = joined("input_ids", -1)
    mask = (ids >= 0).long()
    return {
        "input_ids": ids.clamp(min=0),
        "labels": joined("labels", -100),
        "attention_mask": mask,
    }


def read(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Fine-tune a model that FSDP2 shards.")
    parser.add_argument("--ranks", type=int, default=2, help="without torchrun")
    parser.add_argument("--cp", type=int, default=2, help="ranks that share a sequence")
    parser.add_argument("--model", help="a name or a folder; a small random one without it")
    parser.add_argument("--data", help="a file of JSON lines")
    parser.add_argument("--tokens", type=int, default=131072, help="of a sequence at most")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--output", help="a folder for the model")
    args = parser.parse_args(arguments)
    ranks = int(os.environ.get("WORLD_SIZE", args.ranks))
    if args.cp < 1 or ranks % args.cp:
        parser.error(f"--cp {args.cp} does not divide {ranks} ranks")
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
    model, tokens = model_and_tokens(args.model)
    rows: Any = [row(chat, tokens, args.tokens) for chat in chats(args.data)]
    with tempfile.TemporaryDirectory() as folder:
        training = TrainingArguments(
            args.output or folder,
            use_cpu=not gpu,
            bf16=gpu,
            fsdp=True,
            fsdp_config={"version": 2, "activation_checkpointing": True},
            max_steps=args.steps,
            per_device_train_batch_size=4,
            per_device_eval_batch_size=4,
            learning_rate=3e-3 if args.model is None else 1e-5,
            eval_on_start=True,
            eval_strategy="steps",
            eval_steps=args.steps,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        trainer = ContextParallelTrainer(
            *(model, training),
            train_dataset=rows,
            eval_dataset=rows[:8],
            data_collator=collate,
            cp_size=args.cp,
        )
        trainer.train()
        losses = [x["eval_loss"] for x in trainer.state.log_history if "eval_loss" in x]
        if trainer.is_world_process_zero():
            dp, cp = trainer.mesh.shape
            print(f"{dp} data-parallel by {cp} context-parallel ranks, {args.steps} steps")
            print(f"loss of all completions {losses[0]:.5f} before, {losses[-1]:.5f} after")
        if args.output:
            trainer.save_model()  # whole, by one rank
        trainer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
