"""What number formats cost and save: held-out loss, time and bytes under every policy.

Trains the quickstart model under each policy from several seeds; a seed means the same data and
the same first weights under all of them. A run that is complete is not run again, one that was
interrupted goes on. Then steps of all policies alternate, for ratios of times. Reads the corpus
that scripts/quickstart prepares.
"""

from __future__ import annotations

import argparse
import json
import logging
import pathlib
import statistics
import sys

import _command
import _runs

from palm_jax import config, start
from palm_jax.plan import memory, parameters

CONFIGS = {
    "float32": "quickstart.yaml",
    **{
        name: f"precision_{name}.yaml"
        for name in (
            *("bfloat16", "bfloat16_pure", "float16", "float16_unscaled"),
            *("float8_delayed", "float8_block"),
        )
    },
}


def settings_of(policy: str, seed: int, steps: int, peak: float | None = None) -> config.Config:
    overrides = [f"steps={steps}", f"seed={seed}", "log.tensorboard=false"]
    overrides += [] if peak is None else [f"schedule.peak={peak}"]
    return config.load(f"configs/{CONFIGS[policy]}", overrides)


def mean_and_range(values: list[float]) -> str:
    return f"{statistics.fmean(values):.4f} ({min(values):.4f} to {max(values):.4f})"


def table(
    results: dict[str, list[dict[str, float]]], times: dict[str, float], steps: int
) -> list[str]:
    lines = [
        "| policy | bits per byte, held out: mean (range) | beside float32, same seeds "
        "| skipped updates | step time, of float32's | bytes of state a parameter |",
        "|" + "--|" * 6,
    ]
    for policy, rows in results.items():
        bits = [row["bits_per_byte"] for row in rows]
        settings = settings_of(policy, 0, steps)
        per_parameter = memory.state_bytes(settings) / parameters.number(
            settings.model, padded=True
        )
        beside = "-"
        if "float32" in results and policy != "float32":
            reference = [row["bits_per_byte"] for row in results["float32"]]
            both = [b - r for b, r in zip(bits, reference, strict=True)]
            beside = f"{statistics.fmean(both):+.4f} ({min(both):+.4f} to {max(both):+.4f})"
        ratio = f"{times[policy] / times['float32']:.2f}" if "float32" in times else "-"
        skipped = sum(int(row["skipped"]) for row in rows)
        lines.append(
            f"| {policy} | {mean_and_range(bits)} | {beside} | {skipped} of {steps * len(rows)} "
            f"| {ratio} | {per_parameter:.2f} |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--peak", type=float, help="rate; default: the quickstart's")
    parser.add_argument("--policies", default=",".join(CONFIGS), help="separated by commas")
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("runs/precision"))
    given = parser.parse_args()
    policies = given.policies.split(",")
    if unknown := [policy for policy in policies if policy not in CONFIGS]:
        parser.error(f"no policy {unknown[0]}; there are: {', '.join(CONFIGS)}")
    start.start(settings_of("float32", 0, given.steps))
    logging.getLogger("absl").setLevel(logging.CRITICAL)

    import jax

    from palm_jax import precision

    results: dict[str, list[dict[str, float]]] = {policy: [] for policy in policies}
    for seed in range(given.seeds):
        for policy in policies:
            at = "" if given.peak is None else f"-{given.peak:g}"
            run = given.folder / f"{policy}{at}-{given.steps}-{seed}"
            found = _runs.trained(settings_of(policy, seed, given.steps, given.peak), run)
            results[policy].append(found)
    for policy in policies:
        told = precision.is_emulated(
            settings_of(policy, 0, 1).precision.policy,
            jax.devices()[0].platform,
            jax.devices()[0].device_kind,
        )
        if told is not None:
            print(f"{policy}: {told}", file=sys.stderr)
    kept = given.folder / f"times-{'-'.join(policies)}.json"
    if not kept.exists():
        kept.write_text(
            json.dumps(
                _runs.alternating_times(
                    {policy: settings_of(policy, 0, given.steps) for policy in policies}
                )
            )
        )
    print("\n".join(table(results, json.loads(kept.read_text()), given.steps)))


if __name__ == "__main__":
    _command.run(main)
