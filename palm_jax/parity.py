"""Whether the devices of a run compute the loss that a CPU computes, asked before its first step.

An accelerator may multiply float32 in a shorter format, and a kernel or a sum over its network
may be wrong on it alone. None of that stops a run; all of it moves the loss of a fresh model,
which a CPU can compute as well. A few sequences are compared: the parameters are made from
the seed on each side, and both sides call `Program.losses`.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import numpy as np

from palm_jax import config, doctor, model, processes, sharding
from palm_jax.errors import CannotDo
from palm_jax.plan import parameters
from palm_jax.step import Program, make_program
from palm_jax.tpu import meshes

# Sequences that the CPU computes. A shorter format moves the losses of different sequences in
# different directions, and of a single one by next to nothing once in a while.
SEQUENCES = 4

# The largest relative difference of a sequence's cross-entropy or log Z that passes. Measured
# on models of 40 thousand to 30 million parameters, the largest of four sequences:
#
# float32: meshes of a CPU are up to 3e-7 apart. With factors of matrix products cut to 16 bits,
# about what three passes of a TPU give, losses move by 3e-7 to 5e-7; cut to TensorFloat-32's 11
# by 6e-6 to 2e-5, and to bfloat16's 8 by 4e-5 and more.
# bfloat16: one device and four round in other places, and are up to 2e-4 apart; so are a TPU
# and a CPU. That finds what is wrong, not what is imprecise.
TOLERANCE = {
    "float32": 2e-6,
    "float16": 2e-3,
    "bfloat16": 2e-3,
    "bfloat16_pure": 2e-3,
    "float8": 2e-3,  # evaluated in bfloat16
}

# Parameters beyond which nothing is compared. For as many, four sequences of 2048 tokens are
# 33 TFLOP: minutes of a host's processors, in which its accelerators wait.
LARGEST = 2_000_000_000
# Of the host's memory, by parameter: float32, a copy in the format of computation, and as much
# again for what XLA and a layer's activations take.
BYTES = 16


class Losses(NamedTuple):
    """Of a few sequences, per target token, in nats: f64[sequences]."""

    cross_entropy: np.ndarray
    log_z: np.ndarray


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What was compared."""

    platform: str  # of the run's devices
    sequences: int
    loss: float  # there: their mean cross-entropy, in nats per target token
    loss_on_cpu: float
    difference: float  # relative; the largest of a sequence's cross-entropy or log Z
    tolerance: float

    @property
    def passes(self) -> bool:
        return self.difference <= self.tolerance  # NaN does not


def check(
    program: Program, params: model.Params, rows: np.ndarray, end_of_document: int
) -> dict[str, Any] | None:
    """Fields of a run's `parity` event, before its step 0; None on a CPU, which is the measure.

    With several processes all of them call this together. The first one's CPU computes.

    Args:
      program: of step 0.
      params: the fresh ones, on the program's mesh.
      rows: i32[rows, L+1]: those of the first batch that this process reads.
    Returns:
      Outcome's fields, or {"platform", "left_out": why nothing was compared}.
    Raises:
      CannotDo: the two sides differ by more than the tolerance.
    """
    if (platform := program.mesh.devices.flat[0].platform) == "cpu":
        return None
    outcome = examine(program, params, rows, end_of_document)
    if isinstance(outcome, str):
        return {"platform": platform, "left_out": outcome}
    if not outcome.passes:
        raise CannotDo(refusal(outcome, program.settings.precision.policy))
    return dataclasses.asdict(outcome)


def examine(
    program: Program, params: model.Params, rows: np.ndarray, end_of_document: int
) -> Outcome | str:
    """The comparison, whatever it shows and on any platform; text: why there was none."""
    reason = left_out(program.settings)
    # Of the first process, which alone needs the room; all of them must take the same turn.
    if processes.by_process(reason is not None)[0]:
        return reason or "the first process left it out, and says why"
    settings = program.settings
    there = losses(program, params, _first_rows(program, rows))
    here = there
    if processes.is_first():
        here = losses_on_cpu(settings, rows[:SEQUENCES], end_of_document)
    return Outcome(
        platform=program.mesh.devices.flat[0].platform,
        sequences=len(here.cross_entropy),
        loss=processes.by_process(float(np.mean(there.cross_entropy)))[0],
        loss_on_cpu=processes.by_process(float(np.mean(here.cross_entropy)))[0],
        difference=processes.by_process(largest_difference(there, here))[0],
        tolerance=TOLERANCE[settings.precision.policy],
    )


def left_out(settings: config.Config) -> str | None:
    """Why this process compares nothing for such a config; None: it does."""
    count = parameters.number(settings.model)
    if count > LARGEST:
        return f"{count:,} parameters are more than the {LARGEST:,} that a host computes in minutes"
    needed, (_, available) = count * BYTES, doctor.host_memory()
    if needed > available:
        return (
            f"{count:,} parameters take {needed / doctor.GIB:.1f} GiB on the host, which has "
            f"{available / doctor.GIB:.1f} GiB available"
        )
    try:
        jax.local_devices(backend="cpu")
    except RuntimeError:
        return "JAX_PLATFORMS leaves out the CPU; name it last, as in JAX_PLATFORMS=tpu,cpu"
    return None


def _first_rows(program: Program, rows: np.ndarray) -> np.ndarray:
    """SEQUENCES rows of this process and some more: as many as an evaluation has at once, so
    that one compilation serves both, or a batch if there are fewer in that."""
    settings = program.settings
    unit = settings.numerics.lanes * settings.numerics.microbatch
    size = min(unit * -(-SEQUENCES // unit), settings.data.ramp.sizes[0])
    return rows[: len(program.rows_here(size))]


def losses(program: Program, params: model.Params, rows: np.ndarray) -> Losses:
    """Of the first SEQUENCES of this process's rows, as the program's devices compute them.

    Args:
      rows: i32[rows, L+1], whole passes of the program.
    """
    sums = program.losses(params, program.put(rows), program.put(np.ones(len(rows), np.bool_)))
    slots = sharding.local_slots(program.mesh)

    def per_target(x: jax.Array) -> np.ndarray:
        mean = np.asarray(x, np.float64) / np.asarray(sums.targets)  # [passes, slots, microbatch]
        return mean[:, slots].reshape(-1)[:SEQUENCES]

    return Losses(per_target(sums.cross_entropy), per_target(sums.log_z))


def losses_on_cpu(settings: config.Config, rows: np.ndarray, end_of_document: int) -> Losses:
    """Of all `rows`, as one CPU device of this host computes them for a fresh model."""
    (device, *_) = jax.local_devices(backend="cpu")
    mesh = meshes.physical_mesh([device], {"data": 1, "fsdp": 1, "tensor": 1})
    there = make_program(alone(settings, len(rows)), mesh, end_of_document)
    return losses(there, there.init_params(), rows)


def alone(settings: config.Config, num_sequences: int) -> config.Config:
    """The settings with which one CPU device computes some sequences, one after another.

    XLA's attention computes what the kernel of splash, which is for TPUs, does.
    """
    return config.override(
        settings,
        [
            "data.ramp.starts=[0]",
            f"data.ramp.sizes=[{num_sequences}]",
            *("numerics.lanes=1", "numerics.microbatch=1"),
            *("mesh.data=1", "mesh.fsdp=1", "mesh.tensor=1", "mesh.emulated_devices=null"),
            "model.attention=xla",
        ],
    )


def largest_difference(there: Losses, here: Losses) -> float:
    """Relative, of any sequence's numbers; NaN if one of them is not finite."""
    a, b = np.stack(there), np.stack(here)
    with np.errstate(invalid="ignore"):
        return float(np.max(np.abs(a - b) / np.abs(b)))


def refusal(outcome: Outcome, policy: str) -> str:
    """What an outcome that does not pass means, and what to do about it."""
    message = (
        f"before the first step, {outcome.platform} computes a loss of {outcome.loss:.9g} nats and "
        f"a CPU {outcome.loss_on_cpu:.9g}, of the same {outcome.sequences} sequences. A number of "
        f"one differs by {outcome.difference:.2g} of itself, and precision.policy={policy} allows "
        f"{outcome.tolerance:g}. "
    )
    in_force = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
    if policy == "float32" and in_force != "highest":
        return message + (
            "Matrices may be multiplied in less than float32: set "
            "JAX_DEFAULT_MATMUL_PRECISION=highest"
        )
    return message + (
        "Unset XLA_FLAGS and LIBTPU_INIT_ARGS, and try model.attention=xla and the versions of "
        "constraints.txt; `palm-jax selftest parity` compares without a run"
    )
