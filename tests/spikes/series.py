"""Hand-made histories for the tests of spike detection."""

from __future__ import annotations

import random
from typing import Any


def losses(*values: Any) -> list[tuple[int, dict[str, Any]]]:
    return [(step, {"loss": value}) for step, value in enumerate(values)]


def quiet(num_steps: int, seed: int = 0, sigma: float = 0.03) -> list[float]:
    """A falling power law with noise."""
    rng = random.Random(seed)
    return [2 + 4 * (1 + step / 20) ** -0.5 + rng.gauss(0, sigma) for step in range(num_steps)]


def planted(values: list[float], onset: int, excess: list[float]) -> list[float]:
    """`values` with `excess` added from `onset` on."""
    result = list(values)
    for step, more in enumerate(excess, onset):
        result[step] += more
    return result
