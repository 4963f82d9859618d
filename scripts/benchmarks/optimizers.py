"""Held-out loss of the quickstart's model under every optimizer, each at a tuned rate.

All rules see the same data and begin from the same weights, seed by seed, and their rates warm up
over 20 updates and fall along a cosine to a tenth. Rates are tuned on shorter runs of the first
seed, in steps of about three; a best rate at an end of its grid is marked. A complete run is not
run again, one that was interrupted goes on. Reads the corpus that scripts/quickstart prepares.
"""

from __future__ import annotations

import argparse
import json
import logging
import pathlib
import statistics
from typing import Any

import _command
import _runs

from palm_jax import config, start
from palm_jax.plan import memory

# The rule's settings, and the peaks to try.
RULES: dict[str, tuple[dict[str, Any], tuple[float, ...]]] = {
    "adafactor": ({"name": "adafactor"}, (0.01, 0.03, 0.1)),
    "adafactor, factored": ({"name": "adafactor", "factored": True}, (0.01, 0.03, 0.1)),
    "adamw": ({"name": "adamw"}, (0.001, 0.003, 0.01, 0.03)),
    "lion": ({"name": "lion", "weight_decay": 0.1}, (0.0001, 0.0003, 0.001, 0.003)),
    "muon": ({"name": "muon", "adamw_rate": 0.3}, (0.003, 0.01, 0.03, 0.1)),
    "sgd": ({"name": "sgd"}, (0.1, 0.3, 1.0, 3.0)),
}


def settings_of(rule: str, peak: float, seed: int, steps: int) -> config.Config:
    schedule = {
        "kind": "cosine",
        "peak": peak,
        "final": peak / 10,
        "warmup_steps": 20,
        "decay_steps": steps,
    }
    overrides = [
        *(f"steps={steps}", f"seed={seed}", "log.tensorboard=false", "log.vitals=basic"),
        f"optimizer={json.dumps(RULES[rule][0])}",
        f"schedule={json.dumps(schedule)}",
    ]
    return config.load("configs/quickstart.yaml", overrides)


def bits_per_byte(rule: str, peak: float, seed: int, steps: int, folder: pathlib.Path) -> float:
    run = folder / f"{rule.replace(', ', '-')}-{peak:g}-{steps}-{seed}"
    return _runs.trained(settings_of(rule, peak, seed, steps), run)["bits_per_byte"]


def tuned(rule: str, steps: int, folder: pathlib.Path) -> tuple[float, bool]:
    """The best peak of the rule's, and whether a better one may lie beyond them."""
    peaks = RULES[rule][1]
    found = {peak: bits_per_byte(rule, peak, 0, steps, folder) for peak in peaks}
    best = min(found, key=found.__getitem__)
    return best, best in (peaks[0], peaks[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--tuning-steps", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rules", default=";".join(RULES), help="separated by semicolons")
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("runs/optimizers"))
    given = parser.parse_args()
    rules = given.rules.split(";")
    if unknown := [rule for rule in rules if rule not in RULES]:
        parser.error(f"no rule {unknown[0]!r}; there are: {'; '.join(RULES)}")
    start.start(settings_of("adafactor", 0.01, 0, given.steps))
    logging.getLogger("absl").setLevel(logging.CRITICAL)

    peaks = {rule: tuned(rule, given.tuning_steps, given.folder) for rule in rules}
    rows = {
        rule: [
            bits_per_byte(rule, peaks[rule][0], seed, given.steps, given.folder)
            for seed in range(given.seeds)
        ]
        for rule in rules
    }
    reference = rows.get("adafactor")
    print(
        "| optimizer | peak rate | bits per byte, held out: mean (range) | beside adafactor, same "
        "seeds | bytes a parameter |"
    )
    print("|" + "--|" * 5)
    for rule, bits in rows.items():
        peak, at_an_end = peaks[rule]
        beside = "-"
        if reference is not None and rule != "adafactor":
            both = [b - r for b, r in zip(bits, reference, strict=True)]
            beside = f"{statistics.fmean(both):+.4f} ({min(both):+.4f} to {max(both):+.4f})"
        kept = memory.optimizer_bytes_per_parameter(settings_of(rule, peak, 0, 1))
        print(
            f"| {rule} | {peak:g}{' (end of the grid)' if at_an_end else ''} "
            f"| {statistics.fmean(bits):.4f} ({min(bits):.4f} to {max(bits):.4f}) | {beside} "
            f"| {kept:.2f} |"
        )


if __name__ == "__main__":
    _command.run(main)
