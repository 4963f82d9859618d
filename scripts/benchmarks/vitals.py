"""What the vitals cost: time, memory and operations of a step with them beside one without.

Both programs are compiled first, and not taken from the folder of compiled ones. Then their steps
alternate, in an order that alternates too. What counts is the median of the ratios of neighbouring
steps, by the clock and by the processor's time, with its bootstrapped 95% interval: the fastest
steps of each are less alike than what is to be measured.
"""

from __future__ import annotations

import sys
import time

from palm_jax import config, start

ROUNDS, SWITCH = 110, ("basic", "all")


def measure(overrides: list[str]) -> None:
    def settings_of(vitals: str) -> config.Config:
        return config.load("configs/quickstart.yaml", [f"log.vitals={vitals}", *overrides])

    start.start(settings_of("all"))

    import jax
    import numpy as np

    from palm_jax import sharding, step

    jax.config.update("jax_enable_compilation_cache", False)
    runs = {}
    for vitals in SWITCH:
        settings = settings_of(vitals)
        program = step.make_program(settings, sharding.make_mesh(settings.mesh), 256)
        size = settings.data.ramp.sizes[-1]
        shape = (len(program.rows_here(size)), settings.model.sequence_length + 1)
        batch = program.put(np.random.default_rng(0).integers(0, 256, shape).astype(np.int32))
        began = time.perf_counter()
        lowered = program.traceable_step.lower(program.state_shapes, batch, step.controls())
        executable = lowered.compile()
        facts = {
            "compile_s": time.perf_counter() - began,
            "MiB_temporaries": executable.memory_analysis().temp_size_in_bytes / 2**20,
            "GFLOP": executable.cost_analysis()["flops"] / 1e9,
        }
        runs[vitals] = [program.init(), executable, batch, facts]
    controls = step.controls()
    seconds: dict[str, list[float]] = {vitals: [] for vitals in SWITCH}
    processor: dict[str, list[float]] = {vitals: [] for vitals in SWITCH}
    for number in range(ROUNDS):
        for vitals in SWITCH[:: 1 if number % 2 else -1]:
            held = runs[vitals]
            began, worked = time.perf_counter(), time.process_time()
            held[0], computed = held[1](held[0], held[2], controls)
            jax.block_until_ready((held[0], computed))
            seconds[vitals].append(time.perf_counter() - began)
            processor[vitals].append(time.process_time() - worked)
    print("| | basic | all | all : basic |")
    print("|--|--|--|--|")
    rows = {
        "fastest step, s": [min(seconds[v]) for v in SWITCH],
        "least processor time of a step, s": [min(processor[v]) for v in SWITCH],
    }
    rows |= {name: [runs[v][3][name] for v in SWITCH] for name in runs["all"][3]}
    for name, (basic, every) in rows.items():
        print(f"| {name} | {basic:.3f} | {every:.3f} | {every / basic:.3f} |")
    print()
    for what, times in (("clock", seconds), ("processor", processor)):
        ratios = np.divide(times["all"], times["basic"])
        again = np.random.default_rng(0).choice(ratios, (2000, ROUNDS))
        low, high = np.percentile(np.median(again, axis=1), [2.5, 97.5])
        print(
            f"all : basic by the {what}, median of {ROUNDS} neighbours: {np.median(ratios):.3f} "
            f"({low:.3f} to {high:.3f})"
        )


if __name__ == "__main__":
    measure(sys.argv[1:])
