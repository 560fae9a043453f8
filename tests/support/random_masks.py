"""Masks of every kind by chance, for any numbers of queries and keys. Imports no torch.

`support/drawn_masks.py` has those that say pair by pair what they show.
"""

from __future__ import annotations

from random import Random

from mesh_attention.plan.problem.mask import Mask
from mesh_attention.plan.problem.mask_slices import SliceKind

__all__ = ["random_cuts", "random_mask", "random_slices", "random_window"]


def random_cuts(rng: Random, tokens: int, documents: int = 4) -> tuple[int, ...]:
    return (0, *sorted(rng.randint(0, tokens) for _ in range(documents - 1)), tokens)


def random_window(rng: Random) -> tuple[int | None, int | None]:
    return rng.choice((None, 0, 1, 5)), rng.choice((None, 0, 2, 3))


def random_mask(rng: Random, q_tokens: int, kv_tokens: int) -> Mask:
    """Any member of the family; documents of queries and keys differ in length."""
    match rng.randrange(5):
        case 0:
            return Mask()
        case 1:
            return Mask(causal=True)
        case 2:
            return Mask(causal=rng.random() < 0.5, window=random_window(rng))
        case 3:
            return Mask(causal=True, prefix=rng.randint(0, kv_tokens + 2))
    documents = rng.randint(1, 4)
    starts = random_cuts(rng, q_tokens, documents)
    packed_alike = q_tokens == kv_tokens and rng.random() < 0.5
    return Mask(
        causal=rng.random() < 0.5,
        window=random_window(rng) if rng.random() < 0.5 else None,
        documents=starts,
        kv_documents=None if packed_alike else random_cuts(rng, kv_tokens, documents),
    )


def random_slices(rng: Random, q_tokens: int, kv_tokens: int) -> Mask:
    """A union of a few slices, which may overlap, be empty and leave rows without any key."""

    def some(tokens: int) -> tuple[int, int]:
        start, stop = sorted(rng.randint(0, tokens) for _ in range(2))
        return start, stop

    kinds = tuple(SliceKind)
    return Mask(
        slices=tuple(
            (some(q_tokens), some(kv_tokens), rng.choice(kinds)) for _ in range(rng.randint(0, 6))
        )
    )
