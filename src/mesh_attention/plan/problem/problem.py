"""What is to be computed: sizes and mask, nothing about how or where.

Every part of planning reads a `Problem`; it checks itself when it is made."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache

from mesh_attention.errors import PlanError
from mesh_attention.plan.problem.arguments import number
from mesh_attention.plan.problem.mask import Mask
from mesh_attention.plan.problem.row_ranges import RowRanges

MAX_HEADS = 1 << 16  # far beyond any model; degrees that divide them are looked for one by one
MAX_TOKENS = 1 << 30  # pairs of more tokens than that overflow 64-bit counts


@dataclass(frozen=True, slots=True)
class Problem:
    """One attention over a whole sequence, per batch element.

    head_dim is the size of a query and key head; v_head_dim that of a value and output head
    (None: the same). Statistics (LSE, delta) and accumulators are at least 4 bytes an element.
    """

    q_tokens: int
    num_heads: int
    head_dim: int
    kv_tokens: int | None = None
    num_kv_heads: int | None = None
    v_head_dim: int | None = None
    element_bytes: int = 2
    mask: Mask = field(default_factory=Mask)

    def __post_init__(self) -> None:
        # The optional sizes are filled in once, so that equal problems compare (and hash) equal.
        for name, other in (
            ("q_tokens", "kv_tokens"), ("num_heads", "num_kv_heads"), ("head_dim", "v_head_dim"),
        ):  # fmt: skip
            size = number(name, getattr(self, name))
            object.__setattr__(self, name, size)
            optional = getattr(self, other)
            object.__setattr__(self, other, size if optional is None else number(other, optional))
        if not isinstance(self.mask, Mask):
            raise PlanError(f"mask={self.mask!r}: must be a Mask, such as Mask(causal=True)")
        for name, tokens in (("q_tokens", self.q_tokens), ("kv_tokens", self.keys)):
            if tokens > MAX_TOKENS:
                raise PlanError(f"{name}={tokens}: at most {MAX_TOKENS} are supported")
        if self.num_heads > MAX_HEADS:
            raise PlanError(f"num_heads={self.num_heads}: at most {MAX_HEADS} are supported")
        if self.num_heads % self.kv_heads:
            fits = [d for d in range(1, self.num_heads + 1) if self.num_heads % d == 0]
            raise PlanError(
                f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.kv_heads}; "
                f"KV heads that fit: {', '.join(map(str, fits))}"
            )
        if self.element_bytes not in (2, 4, 8):
            raise PlanError(f"element_bytes={self.element_bytes}: must be 2, 4 or 8")
        self._check_mask()

    def _check_mask(self) -> None:
        for name, cuts, tokens in (
            ("documents", self.mask.documents, self.q_tokens),
            ("kv_documents", self.mask.kv_documents or self.mask.documents, self.keys),
        ):
            if cuts is not None and cuts[-1] != tokens:
                raise PlanError(f"{name} end at {cuts[-1]} but there are {tokens} tokens")
        for at, ((_, q_stop), (_, k_stop), _) in enumerate(self.mask.slices or ()):
            if q_stop > self.q_tokens or k_stop > self.keys:
                raise PlanError(
                    f"slice {at} has queries up to {q_stop} and keys up to {k_stop}, but there are "
                    f"{self.q_tokens} and {self.keys} tokens"
                )

    @property
    def keys(self) -> int:
        assert self.kv_tokens is not None
        return self.kv_tokens

    @property
    def kv_heads(self) -> int:
        assert self.num_kv_heads is not None
        return self.num_kv_heads

    @property
    def v_dim(self) -> int:
        assert self.v_head_dim is not None
        return self.v_head_dim

    @property
    def heads_per_kv_head(self) -> int:
        return self.num_heads // self.kv_heads

    @property
    def accumulate_bytes(self) -> int:
        return max(4, self.element_bytes)

    @property
    def rows(self) -> RowRanges:
        """The mask on this problem's token counts."""
        return self.mask.rows(self.q_tokens, self.keys)

    @property
    def of_any_mask(self) -> Problem:
        """What remains of it where the mask does not matter: masks share what is made for that."""
        return _of_any_mask(self)

    def with_documents(self, documents: tuple[int, ...], kv_documents: tuple[int, ...]) -> Problem:
        """The same problem with the documents of a batch, which also set its lengths."""
        return _with_documents(self, documents, kv_documents)

    def flops(self, pairs: int, *, backward: bool = False) -> float:
        """Floating-point operations of attention over so many (query, key) pairs."""
        forward = 2.0 * pairs * self.num_heads * (self.head_dim + self.v_dim)
        return 2.5 * forward if backward else forward


@lru_cache(maxsize=16)  # every setting of a search asks for it
def _of_any_mask(problem: Problem) -> Problem:
    return replace(problem, mask=Mask())


@lru_cache(maxsize=16)  # choosing a setting and planning it ask for the same
def _with_documents(
    problem: Problem, documents: tuple[int, ...], kv_documents: tuple[int, ...]
) -> Problem:
    apart = None if kv_documents == documents else kv_documents
    mask = replace(problem.mask, documents=documents, kv_documents=apart)
    return replace(problem, mask=mask, q_tokens=documents[-1], kv_tokens=kv_documents[-1])


def problem_text(problem: Problem) -> str:
    """One line for people, which leaves out what is usual."""
    keys = "" if problem.keys == problem.q_tokens else f" against {problem.keys} keys"
    kv_heads = "" if problem.heads_per_kv_head == 1 else f" ({problem.kv_heads} KV heads)"
    values = "" if problem.v_dim == problem.head_dim else f", values of {problem.v_dim}"
    return (
        f"{problem.q_tokens} tokens{keys}, {problem.num_heads} heads of {problem.head_dim}"
        f"{kv_heads}{values}, {problem.element_bytes} bytes an element, {problem.mask.describe()}"
    )
