"""Bytes of a run's arrays on each device, from its config and the rules that cut axes.

Letters as in model.py. Counts are exact Python integers. They hold what a step takes, and the
gradient, which is float32 under every policy; not activations, nor the parameters that it makes
whole or compute in another format, nor the partial sums while it adds up gradients: only a
compiled step tells those.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import math

from palm_jax import config
from palm_jax.plan import parameters
from palm_jax.plan.flops import FLOAT32_BYTES

Rules = collections.abc.Mapping[str, str | None]  # letter -> the mesh axis that cuts it
Groups = dict[str, int]  # group of parameters -> bytes

INT32_BYTES = 4
BFLOAT16_BYTES = 2
NUM_COUNTERS = 3  # the state's: step, updates for the rate, updates for the optimizer


def _devices(mesh: config.Mesh) -> dict[str | None, int]:
    """Along each mesh axis; None, which cuts nothing, counts as one."""
    return {None: 1, "data": mesh.data, "fsdp": mesh.fsdp, "tensor": mesh.tensor}


def sizes_on_device(settings: config.Config, rules: Rules) -> dict[str, int]:
    """The same, where the mesh cuts them; a config is refused if they do not divide."""
    devices = _devices(settings.mesh)
    return {
        axis: size // devices[rules[axis]]
        for axis, size in parameters.sizes(settings.model).items()
    }


def moments(optimizer: config.Optimizer) -> tuple[str, ...]:
    """Names of what the optimizer keeps beside the parameters."""
    match optimizer:
        case config.Adafactor():
            return "momentum", "second_moment"
        case config.AdamW():
            return "first_moment", "second_moment"
        case config.Muon():
            return "momentum", "first_moment", "second_moment"
        case config.SOAP():
            return "first_moment", "second_moment", "covariances", "eigenbases"
        case config.Lion() | config.SGD():
            return ("momentum",)
        case config.Sophia():
            return "momentum", "curvature"


SQUARE = "^2"  # "NHK^2" are the axes of a matrix for each layer, H x K by H x K


def kept_axes(optimizer: config.Optimizer, axes: str) -> dict[str, tuple[str, ...]]:
    """Axes of the arrays that the optimizer keeps of one parameter, by `moments`."""
    is_matrix = len(axes.removeprefix("N")) > 1 and "D" in axes  # biases of heads have none
    match optimizer:
        case config.Adafactor(factored=True) if is_matrix:
            rows = "ND" if axes.startswith("N") else "D"
            return {"momentum": (axes,), "second_moment": (rows, axes.replace("D", ""))}
        case config.Muon():
            # Kernels of layers have one, all else AdamW's two.
            mine = ("momentum",) if is_matrix and axes.startswith("N") else moments(optimizer)[1:]
            return dict.fromkeys(mine, (axes,))
        case config.SOAP():
            found: dict[str, tuple[str, ...]]
            found = dict.fromkeys(moments(optimizer)[:2], (axes,))
            if is_matrix and axes.startswith("N"):
                squares = (f"ND{SQUARE}", f"{axes.replace('D', '')}{SQUARE}")
                found |= dict.fromkeys(moments(optimizer)[2:], squares)
            return found
        case _:
            return dict.fromkeys(moments(optimizer), (axes,))


def stored_bytes(precision: config.Precision) -> int:
    """Bytes of one element of a parameter or of a moment between steps."""
    return BFLOAT16_BYTES if precision.policy == "bfloat16_pure" else FLOAT32_BYTES


def scaling_bytes(settings: config.Config) -> int:
    """Bytes of what a policy remembers of earlier steps, on every device: scales."""
    precision = settings.precision
    if precision.policy == "float16" and precision.loss_scale != "none":
        return FLOAT32_BYTES + 3 * INT32_BYTES  # the scale and its counters
    if precision.policy == "float8" and precision.float8_scaling == "delayed":
        # Of each product's inputs, kernel and gradient: the largest values, and a scale.
        num_products = settings.model.num_layers * len(settings.model.products)
        numbers = num_products * 3 * (precision.float8_history + 1)
        return FLOAT32_BYTES * numbers
    return 0


def _elements(settings: config.Config, sizes: dict[str, int], slices: int = 1) -> dict[str, Groups]:
    """Elements of parameters, and of each of `moments`, by group, of axes that long.

    Args:
      slices: into which square matrices are cut, whatever their axes.
    """
    whole = parameters.sizes(settings.model)

    def num(axes: str) -> int:
        if not axes.endswith(SQUARE):
            return math.prod(sizes[letter] for letter in axes)
        assert isinstance(settings.optimizer, config.SOAP)
        side = math.prod(whole[letter] for letter in axes.removesuffix(SQUARE)[1:])
        too_long = side > settings.optimizer.largest_side
        return 0 if too_long else whole["N"] * side * side // slices

    groups = parameters.axes_by_group(settings.model)
    found = {
        "parameters": {group: sum(num(axes) for axes in leaves) for group, leaves in groups.items()}
    }
    for name in moments(settings.optimizer):
        found[name] = {
            group: sum(
                num(part)
                for axes in leaves
                for part in kept_axes(settings.optimizer, axes).get(name, ())
            )
            for group, leaves in groups.items()
        }
    return found


def state_bytes(settings: config.Config) -> int:
    """Bytes of a whole train state, once, which a checkpoint holds uncompressed."""
    elements = _elements(settings, parameters.sizes(settings.model))
    arrays = sum(sum(groups.values()) for groups in elements.values())
    counters = NUM_COUNTERS * INT32_BYTES + scaling_bytes(settings)
    return arrays * stored_bytes(settings.precision) + counters


def optimizer_bytes_per_parameter(settings: config.Config) -> float:
    """Bytes that the optimizer keeps for each parameter, on average, padding included."""
    elements = {
        name: sum(groups.values())
        for name, groups in _elements(settings, parameters.sizes(settings.model)).items()
    }
    num_parameters = elements.pop("parameters")
    return sum(elements.values()) * stored_bytes(settings.precision) / num_parameters


@dataclasses.dataclass(frozen=True)
class DeviceBytes:
    """Bytes on one device; on every other one they are the same."""

    arrays: dict[str, Groups]  # parameters, each moment, and the gradient
    counters: int  # the state's: step, updates for the rate and the optimizer, scales
    batch: int  # tokens of the largest batch
    controls: int

    @property
    def state(self) -> int:
        kept = (sum(groups.values()) for name, groups in self.arrays.items() if name != "gradient")
        return sum(kept) + self.counters

    @property
    def arguments(self) -> int:
        """Of the compiled step."""
        return self.state + self.batch + self.controls

    @property
    def total(self) -> int:
        """Arguments and gradient."""
        return self.arguments + sum(self.arrays["gradient"].values())


def on_each_device(settings: config.Config, rules: Rules) -> DeviceBytes:
    """What lies on each device of `settings.mesh`.

    Args:
      rules: sharding.RULES.
    """
    slices = _devices(settings.mesh)[rules["E"]]
    elements = _elements(settings, sizes_on_device(settings, rules), slices)
    stored = stored_bytes(settings.precision)
    kept = {name: (groups, stored) for name, groups in elements.items()}
    kept["gradient"] = elements["parameters"], FLOAT32_BYTES
    rows = max(settings.data.ramp.sizes) // settings.mesh.data_parallel
    return DeviceBytes(
        arrays={
            name: {group: size * number for group, number in groups.items()}
            for name, (groups, size) in kept.items()
        },
        counters=NUM_COUNTERS * INT32_BYTES + scaling_bytes(settings),
        batch=INT32_BYTES * rows * (settings.model.sequence_length + 1),
        controls=2 * FLOAT32_BYTES,
    )
