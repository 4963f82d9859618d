"""How many replicates of an arm spiked, and what so few can say."""

from __future__ import annotations

from typing import NamedTuple

import scipy.stats

CHANCE = 0.02  # by which two arms alike may be told apart: 4 of 4 against 0 of 4 have 1/70
CONFIDENCE = 0.95
RARE = 0.6  # of replicates; fewer spike in an arm that is calm. 0 of 4 are consistent with 0.527


class Votes(NamedTuple):
    """Of replicates that differ by what should not matter, such as the order in a batch."""

    spiked: int
    of: int

    @property
    def mostly(self) -> bool:
        """Whether more than half spiked."""
        return 2 * self.spiked > self.of

    def interval(self) -> tuple[float, float]:
        """Exact (Clopper-Pearson) interval of the share that spikes."""
        if self.of == 0:
            return 0.0, 1.0
        found = scipy.stats.binomtest(self.spiked, self.of)
        low, high = found.proportion_ci(CONFIDENCE, method="exact")
        return float(low), float(high)

    def clearly_above(self, other: Votes) -> bool:
        """Whether a larger share spikes than of another arm (Fisher's exact test, one-sided)."""
        table = [[self.spiked, self.of - self.spiked], [other.spiked, other.of - other.spiked]]
        return bool(scipy.stats.fisher_exact(table, alternative="greater").pvalue < CHANCE)

    def spikes(self) -> bool:
        """Whether more spike than of as many that never do."""
        return self.clearly_above(Votes(0, self.of))

    def is_calm(self) -> bool:
        """Whether at most a share of RARE can be expected to spike."""
        if self.of == 0:
            return False
        found = scipy.stats.binomtest(self.spiked, self.of, alternative="less")
        return bool(found.proportion_ci(CONFIDENCE, method="exact").high < RARE)

    def __str__(self) -> str:
        low, high = self.interval()
        return f"{self.spiked} of {self.of} ({low:.0%} to {high:.0%})"
