"""What canonical sums cost: time, memory and bytes of a step beside those of fast ones.

On 1, 2, 4 and 8 emulated devices (all share this machine's cores, so a step takes about as long
on each), and in two processes of four. Programs are compiled first; then steps of all of them
alternate, and each one's fastest counts.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time

from palm_jax import config, start

ROUNDS, REDUCTIONS = 12, ("fast", "canonical")
MESHES = [(1, 1), (2, 1), (1, 2), (4, 1), (1, 4), (8, 1), (1, 8), (2, 4)]
IN_TWO_PROCESSES = [(8, 1), (1, 8), (2, 4)]


def settings_of(mesh: tuple[int, int], reduction: str, overrides: list[str]) -> config.Config:
    data, fsdp = mesh
    return config.load(
        "configs/quickstart.yaml",
        [f"mesh={{data: {data}, fsdp: {fsdp}}}", f"numerics.reduction={reduction}", *overrides],
    )


def measure(meshes: list[tuple[int, int]], overrides: list[str]) -> list[tuple[object, ...]]:
    """(mesh, reduction, seconds, MiB of temporaries, MiB sent by a device), a row a program."""
    start.start(settings_of(meshes[-1], "fast", ["mesh.emulated_devices=8", *overrides]))

    import jax
    import numpy as np

    from palm_jax import modules, sharding, step

    runs = []
    for mesh in meshes:
        for reduction in REDUCTIONS:
            settings = settings_of(mesh, reduction, overrides)
            program = step.make_program(settings, sharding.make_mesh(settings.mesh), 256)
            size = settings.data.ramp.sizes[-1]
            mine = len(program.rows_here(size))
            rng = np.random.default_rng(0)
            shape = (mine, settings.model.sequence_length + 1)
            batch = program.put(rng.integers(0, 256, shape).astype(np.int32))
            controls = step.controls()
            lowered = program.traceable_step.lower(program.state_shapes, batch, controls)
            executable = lowered.compile()
            traffic = modules.read(executable.as_text()).traffic(
                {"data": mesh[0], "fsdp": mesh[1], "tensor": 1}
            )
            facts = (
                executable.memory_analysis().temp_size_in_bytes / 2**20,
                sum(t.sent_bytes for t in traffic.values()) / 2**20,
            )
            runs.append(([program.init()], executable, batch, controls, mesh, reduction, facts))
    fastest = [float("inf")] * len(runs)
    for _ in range(ROUNDS):
        for number, (held, executable, batch, controls, *_) in enumerate(runs):
            began = time.perf_counter()
            held[0], vitals = executable(held[0], batch, controls)
            jax.block_until_ready((held[0], vitals))
            fastest[number] = min(fastest[number], time.perf_counter() - began)
    return [
        (mesh, reduction, seconds, *facts)
        for seconds, (*_, mesh, reduction, facts) in zip(fastest, runs, strict=True)
    ]


def show(where: str, rows: list[tuple[object, ...]]) -> None:
    by_mesh = {(mesh, reduction): numbers for mesh, reduction, *numbers in rows}
    for mesh in dict.fromkeys(row[0] for row in rows):
        fast, canonical = (by_mesh[mesh, reduction] for reduction in REDUCTIONS)
        print(
            f"| {where} | {mesh[0]} x {mesh[1]} | {canonical[0] / fast[0]:.2f} | "
            f"{fast[0]:.2f} | {canonical[0]:.2f} | {fast[1]:.0f} | {canonical[1]:.0f} | "
            f"{fast[2]:.1f} | {canonical[2]:.1f} |",
            flush=True,
        )


def in_two_processes(overrides: list[str]) -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    workers = [
        subprocess.Popen(
            [sys.executable, __file__, *overrides],
            env=os.environ
            | {
                "JAX_COORDINATOR_ADDRESS": address,
                "PALM_JAX_NUM_PROCESSES": "2",
                "PALM_JAX_PROCESS_ID": str(index),
            },
        )
        for index in range(2)
    ]
    if any(worker.wait() for worker in workers):
        sys.exit("a process of the two failed")


if __name__ == "__main__":
    overrides = sys.argv[1:]
    if "PALM_JAX_PROCESS_ID" in os.environ:
        rows = measure(IN_TWO_PROCESSES, overrides)
        if os.environ["PALM_JAX_PROCESS_ID"] == "0":
            show("two processes", rows)
    else:
        print("| | data x fsdp | time, canonical : fast | s, fast | s, canonical ", end="")
        print("| MiB temporaries, fast | canonical | MiB sent, fast | canonical |")
        print("|" + "--|" * 9, flush=True)
        show("one process", measure(MESHES, overrides))
        in_two_processes(overrides)
