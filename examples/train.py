"""A tiny causal transformer, trained on one long sequence that is split over ranks.

    torchrun --nproc-per-node 4 examples/train.py

What a model needs to be context parallel: `cp.shard_batch` gives each rank its tokens with their
positions and targets, attention goes through `cp`, `cp.cross_entropy` is the mean over all ranks,
and gradients are summed over them. The same model is trained beside it on one process, and the
losses are the same.
"""

import os
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from mesh_attention import ContextParallel

TOKENS, VOCABULARY, WIDTH, HEADS, LAYERS, STEPS = 501, 16, 64, 4, 2, 5

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor, attention: Attention) -> Tensor:
        heads = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, WIDTH // HEADS))
        x = x + self.out(attention(*heads.unbind(2)).flatten(2))
        out: Tensor = x + self.mlp(self.norms[1](x))
        return out


class Model(nn.Module):
    """It is told where its tokens stand and how they attend, and knows nothing of ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        x = self.token(tokens) + self.position(positions)
        for block in self.blocks:
            x = block(x, attention)
        logits: Tensor = self.head(x)
        return logits


def on_one_process(tokens: Tensor) -> Iterator[float]:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    model, optimizer = model_and_optimizer(tokens.device)
    positions = torch.arange(TOKENS, device=tokens.device)
    for _ in range(STEPS):
        logits = model(tokens, positions, attention)
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


def on_ranks(tokens: Tensor) -> Iterator[float]:
    model, optimizer = model_and_optimizer(tokens.device)
    with ContextParallel(causal=True) as cp:

        def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out = cp.attention(q, k, v, documents=batch.documents)
            assert isinstance(out, Tensor)
            return out

        batch = cp.shard_batch(input_ids=tokens, labels=tokens)  # labels are shifted there
        for _ in range(STEPS):
            logits = model(batch.input_ids, batch.position_ids, attention)
            mean = cp.cross_entropy(logits, batch.labels, reduce="sum")
            mean.loss.backward()
            for parameter in model.parameters():  # a rank has the gradient of its own tokens' loss
                dist.all_reduce(parameter.grad)
            optimizer.step()
            optimizer.zero_grad()
            yield mean.value.item()


def model_and_optimizer(device: torch.device) -> tuple[Model, torch.optim.Optimizer]:
    torch.manual_seed(0)  # the same parameters everywhere
    model = Model().to(device)
    return model, torch.optim.AdamW(model.parameters(), lr=3e-3)


def main() -> None:
    # A GPU for each process, or none at all.
    gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    dist.init_process_group("nccl" if gpu else "gloo")
    # Each token follows from the one before it, so there is something to learn.
    tokens = torch.tensor([[pow(3, i, 17) % VOCABULARY for i in range(TOKENS)]], device=device)
    pairs = list(zip(on_ranks(tokens), on_one_process(tokens), strict=True))
    if dist.get_rank() == 0:
        print(f"step  loss on {dist.get_world_size()} ranks  loss on one process")
        for step, (many, one) in enumerate(pairs):
            print(f"{step:4}  {many:15.6f}  {one:19.6f}")
    assert all(abs(many - one) < 1e-4 for many, one in pairs), pairs
    assert pairs[-1][0] < pairs[0][0]
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
