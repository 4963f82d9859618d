"""What saving and verifying cost a run, as shares of the time between two saves.

Trains the quickstart model with random tokens and saves as a run does, `checkpoint.every` steps
apart. A save blocks for the digest and a copy of the state; the writing goes on beside the next
steps and may slow them, which is measured, too, as is a verification (verify.every). The state
is that of the model given, so give it another one to see what a larger one costs.
"""

from __future__ import annotations

import pathlib
import statistics
import sys
import tempfile
import time

from palm_jax import config, start

NUM_SAVES = 4


def main() -> None:
    settings = config.load("configs/quickstart.yaml", ["log.tensorboard=false", *sys.argv[1:]])
    start.start(settings)

    import jax
    import numpy as np

    from palm_jax import sharding, step, verify
    from palm_jax.record.checkpoints import Checkpoints, bytes_of

    program = step.make_program(settings, sharding.make_mesh(settings.mesh), 256)
    shape = (settings.data.ramp.sizes[-1], settings.model.sequence_length + 1)
    batch = program.put(np.random.default_rng(0).integers(0, 256, shape).astype(np.int32))
    state = program.init()

    def steps(state: step.TrainState, count: int) -> tuple[step.TrainState, float]:
        began = time.perf_counter()
        for _ in range(count):
            state, _ = program.step(state, batch, step.controls())
        jax.block_until_ready(state)
        return state, (time.perf_counter() - began) / count

    state, _ = steps(state, 2)
    every = settings.checkpoint.every
    blocked, alone, beside = [], [], []
    with (
        tempfile.TemporaryDirectory() as folder,
        Checkpoints(pathlib.Path(folder) / "checkpoints", settings.checkpoint) as saved,
    ):
        for number in range(NUM_SAVES + 1):
            state, seconds = steps(state, 8)
            began = time.perf_counter()
            saved.save(number, state, {}, None)
            if number > 0:  # the first one compiles the digest and starts Orbax
                alone.append(seconds)
                blocked.append(time.perf_counter() - began)
            state, seconds = steps(state, 4)
            if number > 0:
                beside.append(seconds)
            saved.wait()
    verify.verify(program, state, batch)
    verified = min(verify.verify(program, state, batch).seconds for _ in range(3))

    usual = statistics.median(alone)
    interval = every * usual
    print(f"| {bytes_of(program.state_shapes) / 2**20:.0f} MiB of state | |\n|--|--|")
    rows = {
        "step": f"{usual:.3f} s",
        "a save blocks the loop": f"{statistics.median(blocked):.3f} s",
        f"of the {every} steps between two saves": f"{statistics.median(blocked) / interval:.2%}",
        "a step beside the writing, of one alone": f"{statistics.median(beside) / usual:.2f}",
        "a verification": f"{verified / usual:.2f} steps",
        "of a run that verifies every 100 steps": f"{verified / (100 * usual):.2%}",
    }
    print("\n".join(f"| {name} | {value} |" for name, value in rows.items()))


if __name__ == "__main__":
    main()
