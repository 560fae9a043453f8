"""A property of random examples, which Hypothesis draws and, where it fails, makes small."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

__all__ = ["for_all"]


def for_all(check: Callable[[Random], None], examples: int, seed: int) -> None:
    """Drawn from a seed, and nothing is kept between runs: the same tests have the same examples.
    Those of other code may differ, since Hypothesis also tries numbers that it finds there."""
    # Here and not above: GPU machines collect all tests, and need not have Hypothesis for it.
    import hypothesis
    from hypothesis.strategies import randoms

    def example(draw: Random) -> None:
        check(draw)

    each = hypothesis.given(randoms(use_true_random=False))(example)
    chosen = hypothesis.settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=(hypothesis.Phase.generate, hypothesis.Phase.shrink),
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    hypothesis.seed(seed)(chosen(each))()
