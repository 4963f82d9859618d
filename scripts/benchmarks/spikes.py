"""How often detection cries wolf, and how late it is: on made-up losses, and on real logbooks.

Made-up runs are 20,000 steps long: a power law with noise, a batch that doubles on the way, and
in some of them planted trouble. Arguments are runs, whose logbooks are read with the default
settings.
"""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Iterator

import numpy as np

from palm_jax.config import Spikes
from palm_jax.record.folder import RunFolder
from palm_jax.spikes import history
from palm_jax.spikes.detection import Detector, Vitals
from palm_jax.spikes.incidents import Incident

STEPS, RAMP_AT, SEEDS = 20_000, 8_000, 3
SIGMA = 0.03  # nats, at the first batch size; a batch of 1 to 4 million tokens has about this
NOISES = {
    "independent": (0.0, False),
    "autocorrelated, 0.5": (0.5, False),
    "autocorrelated, 0.9": (0.9, False),
    "heavy tails (Student, 4)": (0.0, True),
}


def clean(seed: int, noise: str, sigma: float = SIGMA) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Losses, gradient norms and batch sizes of a run without trouble."""
    rng = np.random.default_rng(seed)
    correlation, heavy = NOISES[noise]
    steps = np.arange(STEPS)
    sizes = np.where(steps < RAMP_AT, 512, 1024)
    shocks = rng.standard_t(4, STEPS) / 2**0.5 if heavy else rng.standard_normal(STEPS)
    scatter = np.empty(STEPS)
    last = 0.0
    for step in range(STEPS):
        last = correlation * last + (1 - correlation**2) ** 0.5 * shocks[step]
        scatter[step] = last
    scatter = scatter * (512 / sizes) ** 0.5
    losses = 1.8 + 8.0 * (1 + steps / 20) ** -0.35 + sigma * scatter
    norms = 0.25 * (1 + 10 * (1 + steps / 30) ** -1.0) * np.exp(0.2 * rng.standard_normal(STEPS))
    return losses, norms * (512 / sizes) ** 0.25, sizes


def found_in(losses: np.ndarray, norms: np.ndarray, sizes: np.ndarray) -> list[object]:
    fold = Detector(Spikes())
    rows = zip(losses.tolist(), norms.tolist(), sizes.tolist(), strict=True)
    return [
        found
        for step, (loss, norm, size) in enumerate(rows)
        for found in fold.add(step, Vitals(loss, norm, size))
    ]


def opened(found: list[object]) -> list[Incident]:
    return [x for x in found if isinstance(x, Incident) and x.outcome is None]


def closed(found: list[object]) -> dict[tuple[str, int, int], Incident]:
    return {x.place: x for x in found if isinstance(x, Incident) and x.outcome is not None}


def table(*columns: str) -> None:
    print("\n| " + " | ".join(columns) + " |")
    print("|" + " --- |" * len(columns))


def row(*cells: object) -> None:
    print("| " + " | ".join(str(cell) for cell in cells) + " |", flush=True)


def false_alarms() -> None:
    kinds = ("jump", "level", "drift", "stall")
    table(f"clean runs, {SEEDS} x {STEPS:,} steps", *kinds, "alarms of the gradient norm")
    for noise in NOISES:
        for sigma in (SIGMA, 0.1):
            counts = dict.fromkeys(kinds, 0)
            alarms = 0
            for seed in range(SEEDS):
                found = found_in(*clean(seed, noise, sigma))
                for incident in opened(found):
                    counts[incident.kind] += 1
                alarms += sum(not isinstance(x, Incident) for x in found)
            row(f"{noise}, {sigma} nats", *counts.values(), alarms)


# Excess over the clean loss, t steps after the onset.
def healing(size: float, rise: int, decay: float) -> Iterator[float]:
    for t in range(STEPS):
        yield size * min(1.0, (t + 1) / rise) * float(np.exp(-max(0, t + 1 - rise) / decay))


def lasting(size: float) -> Iterator[float]:
    for _ in range(STEPS):
        yield size


def rising(slope: float) -> Iterator[float]:
    for t in range(STEPS):
        yield slope * (t + 1)


PLANTED = {
    "0.1 nats, heals (decay 10 steps)": lambda: healing(0.1, 1, 10),
    "0.2 nats, heals": lambda: healing(0.2, 1, 10),
    "0.5 nats, heals": lambda: healing(0.5, 1, 10),
    "2.9 nats, heals in 30 steps (BLOOM's)": lambda: healing(2.9, 3, 8),
    "2.9 nats, comes in 20 steps, heals": lambda: healing(2.9, 20, 10),
    "0.3 nats, stays": lambda: lasting(0.3),
    "6.4 nats, stays": lambda: lasting(6.4),
    "diverges by 0.01 nats a step": lambda: rising(0.01),
    "diverges by 0.001 nats a step": lambda: rising(0.001),
    "diverges by 0.0002 nats a step": lambda: rising(0.0002),
}
ONSETS = (40, 300, 2_500, RAMP_AT + 10, 15_000)


def delays() -> None:
    table("planted", *(f"onset {onset:,}" for onset in ONSETS), "outcomes")
    for name, excess in PLANTED.items():
        cells: list[str] = []
        outcomes: list[str] = []
        for onset in ONSETS:
            waited: list[str] = []
            for seed in range(SEEDS):
                losses, norms, sizes = clean(seed, "autocorrelated, 0.5")
                after = list(zip(range(onset, STEPS), excess(), strict=False))
                losses[onset:] += np.array([x for _, x in after])
                stop = min(STEPS, onset + 3_000)
                found = found_in(losses[:stop], norms[:stop], sizes[:stop])
                first = [x for x in opened(found) if x.detected >= onset and x.kind != "stall"]
                if first:
                    waited.append(str(first[0].detected - onset))
                    ended = closed(found).get(first[0].place)
                    outcomes.append(str(ended.outcome) if ended is not None else "open")
                else:
                    waited.append("-")
            cells.append(", ".join(waited))
        told = ", ".join(f"{outcomes.count(x)} {x}" for x in sorted(set(outcomes)))
        row(name, *cells, told)


def stalls() -> None:
    table("the loss stops falling at step", "detected after, steps (one a seed)")
    for onset in (2_000, 4_750, 10_000):
        waited = []
        for seed in range(SEEDS):
            losses, norms, sizes = clean(seed, "autocorrelated, 0.5")
            trend = 1.8 + 8.0 * (1 + np.arange(STEPS) / 20) ** -0.35
            losses[onset:] += trend[onset] - trend[onset:]
            found = [x for x in opened(found_in(losses, norms, sizes)) if x.kind == "stall"]
            waited.append(str(found[0].detected - onset) if found else "-")
        row(f"{onset:,}", ", ".join(waited))


def real(runs: list[str]) -> None:
    table("logbook", "steps", "incidents", "alarms")
    for run in runs:
        fold, found = history.detector(RunFolder(pathlib.Path(run)), Spikes())
        incidents = [f"{x.kind} at {x.onset}" for x in opened(list(found))]
        alarms = [f"{x.vital} at {x.step}" for x in found if not isinstance(x, Incident)]
        row(run, (fold.last or -1) + 1, ", ".join(incidents) or "-", ", ".join(alarms) or "-")


if __name__ == "__main__":
    false_alarms()
    delays()
    stalls()
    if sys.argv[1:]:
        real(sys.argv[1:])
