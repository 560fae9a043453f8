"""A small GPT on packed documents that are new in every step, data parallel by context parallel.

    python examples/train_gpt.py
    python examples/train_gpt.py --wrap ddp --checkpoints checkpoints --plot loss.png
    torchrun --nproc-per-node 8 examples/train_gpt.py --dp 2 --bf16
    srun --nodes 2 --ntasks-per-node 1 torchrun --nnodes 2 --nproc-per-node 8 \
        --rdzv-backend c10d --rdzv-endpoint $(hostname):29500 examples/train_gpt.py --dp 2 --bf16

It learns the bytes of a text, its own source unless told otherwise. Without torchrun it starts
ranks itself: four over gloo, or one for each GPU. With --checkpoints it goes on from where it was,
also on another number of ranks: the losses are the same. What makes a plain program context
parallel is in `train`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from hashlib import blake2b
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from mesh_attention import ContextParallel, ContextParallelAttention
from mesh_attention.cli.output import progress
from mesh_attention.cost.pictures import pyplot

VOCABULARY = 256  # bytes
SAME_RUN = ("seed", "packs", "tokens", "width", "layers", "heads", "kv_heads", "rate", "bf16")


class Block(nn.Module):
    def __init__(self, args: argparse.Namespace, attention: nn.Module) -> None:
        super().__init__()
        width, self.head_dim = args.width, args.width // args.heads
        self.split = [args.heads, args.kv_heads, args.kv_heads]
        self.attention = attention
        self.norm, self.mlp_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, sum(self.split) * self.head_dim)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor, angles: Tensor, documents: Any) -> Tensor:
        heads = self.qkv(self.norm(x)).unflatten(-1, (-1, self.head_dim))
        q, k, v = heads.split(self.split, dim=2)
        q, k = (rotated(y, angles).type_as(v) for y in (q, k))
        x = x + self.out(self.attention(q, k, v, documents).flatten(2))
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class GPT(nn.Module):
    """It is told where its tokens stand and how they attend, and knows nothing of ranks."""

    def __init__(self, args: argparse.Namespace, attention: nn.Module, keep: Any = None) -> None:
        super().__init__()
        self.again = args.activation_checkpointing or keep is not None
        self.how = {} if keep is None else {"context_fn": keep}
        self.half_dim = args.width // args.heads // 2
        self.tokens = nn.Embedding(VOCABULARY, args.width)
        self.blocks = nn.ModuleList(Block(args, attention) for _ in range(args.layers))
        self.norm, self.head = nn.RMSNorm(args.width), nn.Linear(args.width, VOCABULARY)

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, documents: Any, loss: Any = None
    ) -> Any:
        """Logits; or a `loss` of hidden states and the head, which is whole here alone if FSDP2
        holds it, and whose logits are then never there as a whole."""
        speeds = 1e4 ** -torch.linspace(0, 1, self.half_dim, device=input_ids.device)
        angles = position_ids[..., None, None] * speeds
        x = self.tokens(input_ids)
        for block in self.blocks:
            if self.again:
                x = checkpoint(block, x, angles, documents, use_reentrant=False, **self.how)
            else:
                x = block(x, angles, documents)
        x = self.norm(x)
        return self.head(x) if loss is None else loss(x, self.head.weight, bias=self.head.bias)


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    """RoPE; the angles come from positions, which `shard_batch` gives."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)


def packs(args: argparse.Namespace, place: int, places: int, begin: int = 0) -> Iterator[Any]:
    """Batches of one of `places` data-parallel ranks: of each step the packs place, place + places,
    ... A pack is as many excerpts of the text as it holds, each a document."""
    text = args.text.read_bytes()
    for step in range(begin, args.steps):
        rows, starts = [], []
        for number in range(place, args.packs, places):
            chance = random.Random(f"{args.seed} {step} {number}")
            row, cuts = b"", [0]
            while len(row) < args.tokens:
                at = chance.randrange(len(text))
                row += text[at : at + 1 + int(chance.lognormvariate(4, 1))]
                cuts.append(min(len(row), args.tokens))
            rows.append(list(row[: args.tokens]))
            starts.append(cuts)
        ids = torch.tensor(rows)
        yield {"input_ids": ids, "labels": ids, "cu_seqlens": starts}


def train(args: argparse.Namespace, mesh: DeviceMesh, device: torch.device) -> list[float]:
    """The loss of each step, of those before a checkpoint too."""
    with ContextParallel(mesh["cp"], causal=True) as cp, told_progress(args) as tell:
        keep = cp.keep_attention() if args.keep_attention else None
        model: Any = made(args, ContextParallelAttention(cp), device, keep)
        if args.wrap == "ddp":
            model = DistributedDataParallel(model)
        else:
            ranks = init_device_mesh(device.type, (dist.get_world_size(),))  # over all of them
            for block in model.blocks:
                fully_shard(block, mesh=ranks)
            fully_shard(model, mesh=ranks)
        optimizer = torch.optim.AdamW(model.parameters(), lr=args.rate)
        losses = resumed(args, model, optimizer)
        if len(losses) >= args.steps and dist.get_rank() == 0:
            message = f"{args.checkpoints} is at step {len(losses)}: nothing is left to do"
            print(f"{message} for --steps {args.steps}", file=sys.stderr)
        place = (mesh.get_coordinate() or (0, 0))[0]
        loader = packs(args, place, mesh["dp"].size(), len(losses))
        for whole, docs in cp.prefetch(loader, lambda whole: whole["cu_seqlens"]):
            batch = cp.shard_batch(**whole, documents=docs).to(device)
            loss = partial(
                cp.linear_cross_entropy,
                labels=batch.labels,
                reduce=args.wrap,
                data_parallel=mesh["dp"],
            )
            with torch.autocast(device.type, torch.bfloat16, enabled=args.bf16):
                mean = model(**batch.model_inputs(), loss=loss)
            mean.loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(mean.value.item())
            saved(args, model, optimizer, losses)
            tell(len(losses), losses[-1])
        return losses


def made(
    args: argparse.Namespace, attention: nn.Module, device: torch.device, keep: Any = None
) -> GPT:
    torch.manual_seed(args.seed)  # the same parameters everywhere
    return GPT(args, attention, keep).to(device)


def saved(args: argparse.Namespace, model: Any, optimizer: Any, losses: list[float]) -> None:
    """Every so many steps, and after the last: whole tensors, whoever holds which part of them."""
    done = len(losses)
    if args.checkpoints is None or (done % args.save_every and done != args.steps):
        return
    parts = get_state_dict(model, optimizer)
    run = json.dumps({"losses": losses, "settings": settings(args)})
    state = {"model": parts[0], "optimizer": parts[1], "run": run}
    save(state, checkpoint_id=args.checkpoints / f"step-{done}")


def resumed(args: argparse.Namespace, model: Any, optimizer: Any) -> list[float]:
    """The losses of the latest checkpoint, which model and optimizer then have."""
    checkpoints = args.checkpoints.glob("step-*/.metadata") if args.checkpoints else ()
    steps = [int(file.parent.name.removeprefix("step-")) for file in checkpoints]
    if not steps:
        return []
    folder = args.checkpoints / f"step-{max(steps)}"
    state: dict[str, Any] = {"run": ""}
    load(state, checkpoint_id=folder)
    run = json.loads(state["run"])
    if run["settings"] != settings(args):
        raise SystemExit(f"{folder} is of another run, {run['settings']}: not {settings(args)}")
    parts = get_state_dict(model, optimizer)
    state = {"model": parts[0], "optimizer": parts[1]}
    load(state, checkpoint_id=folder)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    losses: list[float] = run["losses"]
    return losses


def settings(args: argparse.Namespace) -> dict[str, Any]:
    """What must be the same for the losses to be the same."""
    text = blake2b(args.text.read_bytes(), digest_size=8).hexdigest()
    return {name: getattr(args, name) for name in SAME_RUN} | {"text": text}


@contextmanager
def told_progress(args: argparse.Namespace) -> Iterator[Callable[[int, float], None]]:
    """A bar for who looks at a terminal; lines, ten in all, for who reads a log."""
    if dist.get_rank() != 0 or args.json:
        yield lambda step, loss: None
        return
    with progress("training") as bar:

        def tell(step: int, loss: float) -> None:
            if bar is not None:
                bar(step, args.steps)
            elif step % max(args.steps // 10, 1) == 0:
                print(f"step {step}: loss {loss:.4f}", flush=True)

        yield tell


def read(arguments: Sequence[str] | None) -> argparse.Namespace:
    first, *_, about = (__doc__ or "").split("\n\n")
    parser = argparse.ArgumentParser(
        description=f"{first} {about}", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--wrap", choices=("fsdp", "ddp"), default="fsdp", help="who holds parameters and reduces")
    add("--dp", type=int, metavar="N", help="data-parallel ranks; None: 2 of an even number")
    add("--ranks", type=int, default=torch.cuda.device_count() or 4, help="without torchrun")
    add("--steps", type=int, default=50, help="in all, with those of a checkpoint")
    add("--activation-checkpointing", action="store_true", help="compute blocks again in backward")
    add("--keep-attention", action="store_true", help="the same, but for attention")
    add("--checkpoints", type=Path, metavar="FOLDER", help="save there, and go on from there")
    add("--save-every", type=int, default=20, help="steps between two checkpoints")
    add("--plot", type=Path, metavar="PNG", help="draw the losses")
    add("--json", action="store_true", help="one line of JSON and nothing else")
    add("--bf16", action="store_true", help="autocast to bfloat16")
    add("--text", type=Path, default=Path(__file__), help="what is learnt, byte by byte")
    add("--packs", type=int, default=4, help="packs of documents in a step, of all ranks")
    add("--tokens", type=int, default=512, help="of a pack")
    add("--width", type=int, default=64)
    add("--layers", type=int, default=2)
    add("--heads", type=int, default=4)
    add("--kv-heads", type=int, default=2)
    add("--rate", type=float, default=3e-3, help="of learning")
    add("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    ranks = int(os.environ.get("WORLD_SIZE", args.ranks))
    if args.dp is None:
        args.dp = 1 if ranks % 2 else 2
    for name, number in vars(args).items():
        if type(number) is int and name != "seed" and number < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if ranks % args.dp or args.packs < args.dp:
        parser.error(f"--dp {args.dp} must divide the {ranks} ranks and be at most --packs")
    if args.heads % args.kv_heads or args.width % (2 * args.heads):
        parser.error("--kv-heads must divide --heads, and twice those --width")
    if not args.text.is_file() or not args.text.stat().st_size:
        parser.error(f"--text {args.text} is no file, or empty")
    if not 0 < args.rate < float("inf"):
        parser.error(f"--rate {args.rate} must be positive and finite")
    if args.plot and not args.plot.parent.is_dir():
        parser.error(f"--plot {args.plot}: there is no folder {args.plot.parent}")
    try:
        if args.checkpoints:
            args.checkpoints.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--checkpoints {args.checkpoints} cannot be made: {error.strerror}")
    if args.plot and find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install matplotlib")
    return args


def main(arguments: Sequence[str] | None = None) -> None:
    args = read(arguments)
    if "RANK" not in os.environ:
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={args.ranks}"]
        own_arguments = sys.argv[1:] if arguments is None else arguments
        environment = {"OMP_NUM_THREADS": "1"} | os.environ
        command = [sys.executable, *torchrun, __file__, *own_arguments]
        try:
            raise SystemExit(subprocess.call(command, env=environment))
        except KeyboardInterrupt:  # torchrun has it too, and ends its ranks
            raise SystemExit(130) from None
    # A GPU for each process, or none at all.
    gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if gpu else "gloo")
    sizes = (args.dp, dist.get_world_size() // args.dp)
    mesh = init_device_mesh(device.type, sizes, mesh_dim_names=("dp", "cp"))
    begin = time.monotonic()
    losses = train(args, mesh, device)
    if dist.get_rank() == 0:
        show(args, sizes, losses, time.monotonic() - begin)
    dist.destroy_process_group()


def show(
    args: argparse.Namespace, sizes: tuple[int, int], losses: list[float], seconds: float
) -> None:
    if args.plot:
        figure, axes = pyplot().subplots(figsize=(7, 4))
        axes.plot(range(1, len(losses) + 1), losses)
        axes.set(xlabel="step", ylabel="loss (nats a byte)")
        figure.savefig(args.plot, bbox_inches="tight", dpi=120)
    if args.json:
        result = {"dp": sizes[0], "cp": sizes[1], "wrap": args.wrap, "seconds": seconds}
        print(json.dumps(result | {"losses": losses}))
        return
    print(f"{sizes[0]} data-parallel by {sizes[1]} context-parallel ranks, {args.wrap}")
    # The curve in one line of text.
    some = losses[:: -(-len(losses) // 60)]
    low, high = min(some), max(some)
    marks = "".join("▁▂▃▄▅▆▇█"[round(7 * (x - low) / (high - low or 1))] for x in some)
    print(f"loss {losses[0]:.3f} {marks} {losses[-1]:.3f} in {len(losses)} steps, {seconds:.1f} s")


if __name__ == "__main__":
    main()
