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
import time

from palm_jax import config, start
from palm_jax.errors import CannotDo, WrongInput
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
ROUNDS = 12  # of alternating steps


def settings_of(policy: str, seed: int, steps: int) -> config.Config:
    overrides = [f"steps={steps}", f"seed={seed}", "log.tensorboard=false"]
    return config.load(f"configs/{CONFIGS[policy]}", overrides)


def result(run: pathlib.Path, steps: int) -> dict[str, float] | None:
    """Bits per byte at the end of a run and its skipped updates; None: it is not complete."""
    from palm_jax.record import folder, logbook

    if not folder.is_run(run):
        return None
    records = logbook.read(run).records
    ends = [r for r in records if r["event"] == "evaluation" and r["step"] == steps]
    if not ends:
        return None
    last = {r["step"]: r["computed"] for r in records if r["event"] == "step"}
    skipped = sum(not fields["applied"] for fields in last.values())
    return {"bits_per_byte": float(ends[-1]["bits_per_byte"]), "skipped": skipped}


def measure_times(policies: list[str], steps: int) -> dict[str, float]:
    """Seconds of a step of the largest batch, the fastest of several that alternate."""
    import jax
    import numpy as np

    from palm_jax import sharding, step

    runs = []
    for policy in policies:
        settings = settings_of(policy, 0, steps)
        program = step.make_program(settings, sharding.make_mesh(settings.mesh), 256)
        shape = (settings.data.ramp.sizes[-1], settings.model.sequence_length + 1)
        tokens = np.random.default_rng(0).integers(0, 256, shape).astype(np.int32)
        runs.append(([program.init()], program, program.put(tokens), step.controls()))
    fastest = dict.fromkeys(policies, float("inf"))
    for turn in range(ROUNDS + 1):
        for policy, (held, program, batch, controls) in zip(policies, runs, strict=True):
            began = time.perf_counter()
            held[0], vitals = program.step(held[0], batch, controls)
            jax.block_until_ready((held[0], vitals))
            if turn > 0:  # the first one compiles
                fastest[policy] = min(fastest[policy], time.perf_counter() - began)
    return fastest


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
    parser.add_argument("--policies", default=",".join(CONFIGS), help="separated by commas")
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("runs/precision"))
    given = parser.parse_args()
    policies = given.policies.split(",")
    if unknown := [policy for policy in policies if policy not in CONFIGS]:
        parser.error(f"no policy {unknown[0]}; there are: {', '.join(CONFIGS)}")
    start.start(settings_of("float32", 0, given.steps))
    logging.getLogger("absl").setLevel(logging.CRITICAL)

    import jax

    from palm_jax import precision, train

    results: dict[str, list[dict[str, float]]] = {policy: [] for policy in policies}
    for seed in range(given.seeds):
        for policy in policies:
            run = given.folder / f"{policy}-{given.steps}-{seed}"
            found = result(run, given.steps)
            if found is None:
                settings = settings_of(policy, seed, given.steps)
                platform = jax.devices()[0].platform
                wanted = start.matmul_precision(settings.precision, platform)
                print(f"training {run}", file=sys.stderr, flush=True)
                with jax.default_matmul_precision(wanted):
                    train.train(settings, run)
                found = result(run, given.steps)
            assert found is not None
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
        kept.write_text(json.dumps(measure_times(policies, given.steps)))
    print("\n".join(table(results, json.loads(kept.read_text()), given.steps)))


if __name__ == "__main__":
    try:
        main()
    except (WrongInput, CannotDo) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
