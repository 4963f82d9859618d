"""Runs that a benchmark trains once: complete ones are read, interrupted ones go on."""

from __future__ import annotations

import pathlib
import sys
import time

from palm_jax import config, start

ROUNDS = 12  # of alternating steps


def finished(run: pathlib.Path, steps: int) -> dict[str, float] | None:
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


def trained(settings: config.Config, run: pathlib.Path) -> dict[str, float]:
    """As `finished`, of a run that is trained if it has to be."""
    found = finished(run, settings.steps)
    if found is None:
        import jax

        from palm_jax import train

        platform = jax.devices()[0].platform
        print(f"training {run}", file=sys.stderr, flush=True)
        with jax.default_matmul_precision(start.matmul_precision(settings.precision, platform)):
            train.train(settings, run)
        found = finished(run, settings.steps)
    assert found is not None
    return found


def alternating_times(kinds: dict[str, config.Config]) -> dict[str, float]:
    """Seconds of a step of the largest batch, the fastest of several that alternate."""
    import jax
    import numpy as np

    from palm_jax import sharding, step

    runs = []
    for settings in kinds.values():
        program = step.make_program(settings, sharding.make_mesh(settings.mesh), 256)
        shape = (settings.data.ramp.sizes[-1], settings.model.sequence_length + 1)
        tokens = np.random.default_rng(0).integers(0, 256, shape).astype(np.int32)
        runs.append(([program.init()], program, program.put(tokens), step.controls()))
    fastest = dict.fromkeys(kinds, float("inf"))
    for turn in range(ROUNDS + 1):
        for kind, (held, program, batch, controls) in zip(kinds, runs, strict=True):
            began = time.perf_counter()
            held[0], vitals = program.step(held[0], batch, controls)
            jax.block_until_ready((held[0], vitals))
            if turn > 0:  # the first one compiles
                fastest[kind] = min(fastest[kind], time.perf_counter() - began)
    return fastest
