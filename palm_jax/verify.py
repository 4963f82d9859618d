"""Silent corruption: a chip that computes something else, and says nothing.

Such a chip, given the same rows again, may make the same mistake again. So every
`verify.every` steps the gradients of a step are computed twice before it is made: on the devices
that they belong to, and with every microbatch moved on by one device. What a microbatch gives
does not depend on the device that computes it (docs/bits.md); where two digests differ, one of
the two devices has failed, and with more than two devices in a row it is known which.
"""

from __future__ import annotations

import collections
import dataclasses
import time
from typing import Any

import jax
import numpy as np

from palm_jax import processes
from palm_jax.step import Program, TrainState


@dataclasses.dataclass(frozen=True)
class Verification:
    """Two computations of one step's gradients."""

    microbatches: int
    differing: tuple[int, ...]  # indices of microbatches
    suspects: tuple[int, ...]  # devices of a pass (data x fsdp) that took part in most of them
    seconds: float


def verify(program: Program, state: TrainState, batch: jax.Array) -> Verification:
    """Compute the gradients of `batch` twice, on other devices the second time.

    Args:
      batch: i32[passes, devices, microbatch, L+1], as from `Program.put`. On one device the
        second computation is a repetition.
    """
    jax.block_until_ready(state)  # steps before may still be under way
    began = time.perf_counter()
    straight = np.asarray(program.microbatch_digests(state, batch))
    moved = np.asarray(program.microbatch_digests(state, program.moved(batch)))
    differing, suspects = compare(straight, moved, program.settings.mesh.data_parallel)
    return Verification(
        microbatches=len(straight),
        differing=differing,
        suspects=suspects,
        seconds=time.perf_counter() - began,
    )


def compare(
    straight: np.ndarray, moved: np.ndarray, width: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Microbatches that differ, and the devices that most of those were computed on.

    Args:
      straight: u32[microbatches, 2]; microbatch m was computed on device m % width.
      moved: likewise, where device (m + 1) % width computed microbatch m of its pass.
    """
    back = np.roll(moved.reshape(-1, width, 2), -1, axis=1).reshape(-1, 2)
    differing = np.flatnonzero((straight != back).any(axis=1)).tolist()
    parts: collections.Counter[int] = collections.Counter()
    for microbatch in differing:
        parts.update({microbatch % width, (microbatch + 1) % width})
    most = max(parts.values(), default=0)
    return tuple(differing), tuple(sorted(d for d, n in parts.items() if n == most))


def places(program: Program, devices: tuple[int, ...]) -> list[dict[str, Any]]:
    """Where devices of a pass are: their process, its host, and JAX's numbers for them."""
    if not devices:
        return []
    by_slot = program.mesh.devices.reshape(-1, program.mesh.devices.shape[-1])
    hosts = processes.hosts()
    return [
        {
            "device": slot,
            "process": here[0].process_index,
            "host": hosts[here[0].process_index],
            "ids": [device.id for device in here],
        }
        for slot in devices
        for here in [list(by_slot[slot])]
    ]


def told(found: Verification, where: list[dict[str, Any]]) -> str:
    """The verdict of a verification that failed, as a sentence's part."""
    names = ", ".join(
        f"device {p['device']} on {p['host']} (process {p['process']})" for p in where
    )
    return (
        f"{len(found.differing)} of {found.microbatches} microbatches gave another gradient on "
        f"another device; suspected: {names}"
    )
