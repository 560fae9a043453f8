"""GRPO with TRL, each sequence on several ranks.

    python examples/grpo.py
    python examples/grpo.py --ranks 4 --cp 2 --steps 20
    torchrun --nproc-per-node 8 examples/grpo.py --cp 4
    srun --nodes 2 --ntasks-per-node 1 torchrun --nnodes 2 --nproc-per-node 8 \
        --rdzv-backend c10d --rdzv-endpoint $(hostname):29500 examples/grpo.py --cp 4

A small random Llama learns to write vowels, for which a function rewards it. Without torchrun it
starts two ranks over gloo itself. For a model of your own replace `make_model`, `make_tokenizer`,
`PROMPTS` and `vowels`: what makes it context parallel is `ContextParallelGRPOTrainer` in place of
TRL's `GRPOTrainer`, and `cp_size`. Completions are generated from whole sequences, by the model's
own attention; log-probabilities and their gradients are of each rank's tokens.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from string import ascii_lowercase
from typing import Any

import torch
import torch.distributed as dist
from datasets import Dataset
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig

from mesh_attention.huggingface.trl import ContextParallelGRPOTrainer

NAMED = ["<pad>", "<s>", "</s>", " "]
PROMPTS = ["the quick brown fox", "jumps over", "a lazy dog and", "runs", "to the old mill", "by"]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Of letters; no file is read."""
    letters = {letter: at for at, letter in enumerate([*NAMED, *ascii_lowercase])}
    tokenizer: Any = Tokenizer(models.WordLevel(letters, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    named = dict(zip(("pad_token", "bos_token", "eos_token"), NAMED, strict=False))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named)


def make_model() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(NAMED) + len(ascii_lowercase),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return LlamaForCausalLM(config)


def vowels(completions: list[str], **_: Any) -> list[float]:
    """Their share of a completion: TRL wants a number for each."""
    return [sum(letter in "aeiou" for letter in text) / max(len(text), 1) for text in completions]


def read(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="GRPO on context-parallel ranks.")
    parser.add_argument("--ranks", type=int, default=2, help="without torchrun")
    parser.add_argument("--cp", type=int, default=2, help="ranks that share a sequence")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=16, help="of a completion at most")
    args = parser.parse_args(arguments)
    for name in ("ranks", "cp", "steps", "tokens"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} {getattr(args, name)}: must be 1 or more")
    ranks = int(os.environ.get("WORLD_SIZE", args.ranks))
    if ranks % args.cp:
        parser.error(f"--cp {args.cp} does not divide {ranks} ranks")
    return args


def main(arguments: Sequence[str] | None = None) -> None:
    args = read(arguments)
    if "RANK" not in os.environ:
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={args.ranks}"]
        own_arguments = sys.argv[1:] if arguments is None else arguments
        environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | os.environ
        command = [sys.executable, *torchrun, __file__, *own_arguments]
        raise SystemExit(subprocess.call(command, env=environment))
    # A GPU for each process, or none at all.
    gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    with tempfile.TemporaryDirectory() as folder:
        training = GRPOConfig(
            folder,
            use_cpu=not gpu,
            bf16=gpu,
            max_steps=args.steps,
            per_device_train_batch_size=8,
            num_generations=4,
            max_completion_length=args.tokens,
            learning_rate=2e-2,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        trainer = ContextParallelGRPOTrainer(
            model=make_model(),
            reward_funcs=vowels,
            args=training,
            train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
            processing_class=make_tokenizer(),
            cp_size=args.cp,
        )
        trainer.train()
        if trainer.is_world_process_zero():
            rewards = [line["reward"] for line in trainer.state.log_history if "reward" in line]
            dp, cp = trainer.mesh.shape
            print(f"{dp} data-parallel by {cp} context-parallel ranks, {args.steps} steps")
            print(f"vowels {rewards[0]:.5f} in the first step, {rewards[-1]:.5f} in the last")
        trainer.close()  # the model attends by itself again
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
