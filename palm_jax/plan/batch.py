"""How large a batch: tokens of a ramp, the critical batch, rates that follow the size."""

from __future__ import annotations

import dataclasses
import math

from palm_jax.errors import WrongInput


@dataclasses.dataclass(frozen=True)
class NoiseScale:
    """How noisy the gradient of one example is, against the gradient itself."""

    squared_gradient: float  # |G|^2, of the true gradient
    variance: float  # S, summed over parameters, of one example's gradient

    @property
    def batch(self) -> float:
        """Where noise and gradient are equally large; the unit is that of the batches given."""
        return self.variance / self.squared_gradient


def noise_scale(
    small_batch: float, large_batch: float, small_norm_squared: float, large_norm_squared: float
) -> NoiseScale:
    """From the squared norms of gradients over two batch sizes, averaged over many steps.

    Averages of |G|^2 and S each; their ratio's average would be biased.

    Source: McCandlish et al., 2018, appendix A.1.
    """
    if not 0 < small_batch < large_batch:
        raise WrongInput(
            f"batches {small_batch:g} and {large_batch:g}: the first must be the smaller one"
        )
    squared = (large_batch * large_norm_squared - small_batch * small_norm_squared) / (
        large_batch - small_batch
    )
    variance = (small_norm_squared - large_norm_squared) / (1 / small_batch - 1 / large_batch)
    return NoiseScale(squared, variance)


def rate_for_batch(rate: float, batch: float, reference_batch: float) -> float:
    """The rate that a batch wants if `rate` was right for another: by the square root of both."""
    return rate * math.sqrt(batch / reference_batch)
