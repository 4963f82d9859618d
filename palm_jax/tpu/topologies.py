"""TPU slices described to the compiler, on a machine that has none.

libtpu holds the whole compiler for TPUs. Given the name of a topology it answers with devices
that nothing can run on but that programs can be compiled for. Nothing here may import JAX at
the top: `environment` must be set first.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import itertools
import math
import os
import re
from typing import TYPE_CHECKING

from palm_jax.errors import CannotDo, WrongInput
from palm_jax.plan import flops

if TYPE_CHECKING:
    import jax

GIB = 2**30

# For a process that may load libtpu on a machine without a TPU. JAX loads it whenever it looks
# for devices of every kind, so this matters to one that computes on the CPU as well.
NO_TPU = {
    "TPU_SKIP_MDS_QUERY": "1",  # do not ask Google Cloud what machine this is
    # Stand for what Google Cloud would have said; libtpu complains of each that it misses.
    # Topologies named explicitly are the same whichever type this is.
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v4-8",
    # Its lock lets one process at a time load it, and a second one dies.
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    # /tmp/tpu_logs is the first user's; libtpu complains to every other one, at length.
    "TPU_LOG_DIR": "disabled",
}


@dataclasses.dataclass(frozen=True)
class Chip:
    """What is known of one kind of TPU chip, which JAX then sees as one device."""

    device_kind: str  # jax.Device.device_kind
    config: str  # libtpu's name of the configuration in which a chip is one device
    num_axes: int  # of its network, a torus or a mesh
    pod: int  # chips in the largest slice
    hbm: int  # bytes that a program may take, as the compiler counts them
    flops_per_cycle: int  # bfloat16, all matrix units together

    @property
    def peak_flops(self) -> float:
        """bfloat16 FLOP/s."""
        return flops.PEAK_FLOPS[self.device_kind]

    @property
    def clock(self) -> float:
        """Cycles a second at which the matrix units reach the peak."""
        return self.peak_flops / self.flops_per_cycle


# `hbm` is what the compiler of libtpu 0.0.42 names when a program is too large ("exceeds
# available HBM (30.75G)"), of the 32, 16, 96 and 32 GiB that the chips have. 0.0.50 names 95.73
# for v5p and 31.24 for v6e.
#
# `flops_per_cycle` is cores x units x rows x columns x 2, from the number and size of a core's
# units in JAX's own table (jax/_src/pallas/mosaic/tpu_info.py). For v6e that table gives half
# of what is here, and would give 3.5 GHz; the compiler counts up to 4.6e5 FLOPs a cycle in a
# plain product of matrices (at most 97% of the figures here on the others).
CHIPS = {
    "v4": Chip("TPU v4", "megacore", 3, 4096, int(30.75 * GIB), 2 * 4 * 128 * 128 * 2),
    "v5e": Chip("TPU v5 lite", "default", 2, 256, int(15.75 * GIB), 1 * 4 * 128 * 128 * 2),
    "v5p": Chip("TPU v5", "default", 3, 8960, int(95.74 * GIB), 2 * 4 * 128 * 128 * 2),
    "v6e": Chip("TPU v6 lite", "default", 2, 256, int(31.25 * GIB), 1 * 4 * 256 * 256 * 2),
}


@dataclasses.dataclass(frozen=True)
class Topology:
    """Equal slices of TPU chips, each joined by its own network. Make it with `parse`."""

    kind: str  # of CHIPS
    shape: tuple[int, ...]  # chips along each axis of a slice's network
    num_slices: int = 1

    @property
    def name(self) -> str:
        """Of one slice, as libtpu and `parse` take it."""
        return f"{self.kind}:{_by_x(self.shape)}"

    @property
    def chip(self) -> Chip:
        return CHIPS[self.kind]

    @property
    def num_chips(self) -> int:
        """In all slices together."""
        return math.prod(self.shape) * self.num_slices

    def devices(self) -> list[jax.Device]:
        """One device a chip, to compile for; the slices one after another.

        Raises:
          CannotDo: libtpu is not installed, or does not know this topology.
        """
        version = libtpu_version()
        missing = [name for name, value in environment().items() if os.environ.get(name) != value]
        assert not missing, f"topologies.environment() comes before JAX is imported: {missing}"

        from jax.errors import JaxRuntimeError
        from jax.experimental import topologies

        options: dict[str, object] = {"chip_config_name": self.chip.config}
        if self.num_slices > 1:
            options["num_slices"] = self.num_slices
        if math.prod(self.shape) == 1:
            # libtpu takes a host to have 2 x 2 chips; a lone chip's host has one.
            options["chips_per_host_bounds"] = [1, 1, 1]
        try:
            described = topologies.get_topology_desc(self.name, platform="tpu", **options)
        except JaxRuntimeError as error:
            near = self._near()
            raise CannotDo(
                f"libtpu {version} cannot describe {self.name}: {str(error).splitlines()[0]}"
                + (f" (near it: {', '.join(near)})" if near else "")
            ) from None
        assert len(described.devices) == self.num_chips, (self, len(described.devices))
        return described.devices

    def _near(self) -> list[str]:
        """Names of up to four topologies that 2 x 2 chips a host divide, the nearest first."""
        choices = [{max(size - size % 2, 2), size + size % 2} for size in self.shape[:2]]
        shapes = [(*pair, *self.shape[2:]) for pair in itertools.product(*choices)]
        shapes.sort(key=lambda shape: (abs(math.prod(shape) - math.prod(self.shape)), shape))
        return [f"{self.kind}:{_by_x(shape)}" for shape in shapes if shape != self.shape]


def environment() -> dict[str, str]:
    """What must be set before JAX is imported, in a process that only compiles for TPUs.

    Also right on a TPU VM: such a process leaves the chips to others.
    """
    return {"JAX_PLATFORMS": "cpu"} | NO_TPU


def libtpu_version() -> str:
    """To be named beside every figure of the compiler's: they change from one to the next.

    Raises:
      CannotDo: libtpu is not installed.
    """
    try:
        return importlib.metadata.version("libtpu")
    except importlib.metadata.PackageNotFoundError:
        raise CannotDo(
            "compiling for TPUs needs libtpu, which is not installed: pip install 'palm-jax[tpu]'"
        ) from None


def parse(name: str, num_slices: int = 1) -> Topology:
    """The topology of a name such as v4:16x16x12 or v5e:4x4.

    Raises:
      WrongInput: this is no such name, or there cannot be such a slice.
    """
    match = re.fullmatch(r"([a-z0-9]+):([1-9][0-9]{0,5}(?:x[1-9][0-9]{0,5})*)", name)
    if match is None:
        raise WrongInput(
            f"{name!r} is no TPU topology: give the kind and the chips along each axis of a "
            "slice, for example v4:2x2x4 or v5e:4x4"
        )
    kind, shape = match[1], tuple(int(size) for size in match[2].split("x"))
    if kind not in CHIPS:
        raise WrongInput(
            f"{name!r}: there is no TPU kind {kind!r} here; it must be one of {', '.join(CHIPS)}, "
            "for example v4:2x2x4"
        )
    chip = CHIPS[kind]
    if len(shape) != chip.num_axes:
        example = "2x2x4" if chip.num_axes == 3 else "4x4"
        raise WrongInput(
            f"{name!r} has {len(shape)} axes, but a slice of {kind} has {chip.num_axes}, "
            f"for example {kind}:{example}"
        )
    if math.prod(shape) > chip.pod:
        raise WrongInput(
            f"{name!r} has {math.prod(shape)} chips, but a slice of {kind} has at most "
            f"{chip.pod}; ask for several slices"
        )
    if num_slices < 1:
        raise WrongInput(f"there must be 1 slice of {name} or more, not {num_slices}")
    return Topology(kind, shape, num_slices)


def _by_x(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))
