"""Bytes that a step needs on a device beside its arguments, from the config alone.

What XLA keeps while a step runs depends on its schedule, which only a compilation knows. This
follows the step's own phases, and takes the largest:

  the loss              float32 logits, what they are exponentiated to, and their gradient
  a layer's backward    its kernels made whole, their gradients, and what is received of them
  the embedding         its gradient made whole in float32, and what is received of it
  the update            gradients made into updates, for all parameters at once

all beside the parameters in the compute format, the sums of gradients, and what the forward pass
leaves to the backward pass. The numbers of buffers were read in programs that libtpu 0.0.42
compiled; `palm-jax compile` has the compiler's own word. Letters as in model.py; t: tensor.
"""

from __future__ import annotations

import dataclasses
import math

from palm_jax import config
from palm_jax.plan import memory, parameters
from palm_jax.plan.flops import FLOAT32_BYTES
from palm_jax.plan.memory import BFLOAT16_BYTES, Rules

LOGITS = 3  # float32 arrays of their size
TABLES = 2  # float32 arrays of the embedding's size, made whole along D
LAYERS = 7  # arrays of one layer's kernels, made whole along D in the compute format
UPDATES = 2  # float32 arrays of all parameters
GAPS = 0.3  # what lies unused beside kept activations, as a share of them

ASSUMED = (
    "activations and buffers are an estimate, made for bfloat16 on TPUs, and within 10% of what "
    "libtpu 0.0.42 allots to PaLM's three sizes; palm-jax compile has the compiler's own word",
)


@dataclasses.dataclass(frozen=True)
class Passing:
    """Bytes on one device that live for a part of the step."""

    parts: dict[str, int]  # alive at the peak

    @property
    def total(self) -> int:
        return sum(self.parts.values())


def on_each_device(settings: config.Config, rules: Rules) -> Passing:
    """What a step of the ramp's largest batch needs beside its arguments.

    Args:
      rules: sharding.RULES.
    """
    mesh, model, numerics = settings.mesh, settings.model, settings.numerics
    compute = FLOAT32_BYTES if settings.precision.policy == "float32" else BFLOAT16_BYTES
    here = parameters.sizes(model)
    cut = memory.sizes_on_device(settings, rules)
    whole_here = cut | {"D": here["D"]}  # gathered along D, not over `tensor`

    def elements(groups: tuple[str, ...], sizes: dict[str, int], layer: bool = False) -> int:
        found = parameters.axes_by_group(model)
        axes = [one for group in groups for one in found[group]]
        if layer:
            axes = [one.removeprefix("N") for one in axes if one.startswith("N")]
        return sum(math.prod(sizes[letter] for letter in one) for one in axes)

    groups = tuple(parameters.axes_by_group(model))
    stored = elements(groups, cut)
    layer = elements(groups, whole_here, layer=True)
    table = math.prod(whole_here[letter] for letter in "VD")
    tokens = numerics.microbatch * model.sequence_length
    chunk = tokens if numerics.loss_chunk is None else numerics.microbatch * numerics.loss_chunk
    phases = {
        "loss: logits": LOGITS * FLOAT32_BYTES * chunk * cut["V"] + compute * table,
        "layer: kernels and gradients": (
            FLOAT32_BYTES * stored + compute * (LAYERS * layer + table)
        ),
        "embedding: gradient": FLOAT32_BYTES * (TABLES * table + stored),
        "update": FLOAT32_BYTES * UPDATES * stored,
    }
    name = max(phases, key=phases.__getitem__)
    kept = model.num_layers * kept_of_layer(settings)
    # Who computes a layer again gathers its kernels again; who does not keeps them.
    keeps_kernels = model.remat == "none" and mesh.fsdp > 1
    parts = {
        "parameters to compute with": compute * stored if compute != FLOAT32_BYTES else 0,
        "sums of gradients": FLOAT32_BYTES * stored * _sums(settings),
        f"activations kept, remat={model.remat}": kept,
        "gaps between arrays": round(GAPS * kept),
        "kernels kept, whole": model.num_layers * compute * layer if keeps_kernels else 0,
        name: phases[name],
    }
    if name == "update":  # the passes are over
        parts = {"sums of gradients": FLOAT32_BYTES * stored, name: phases[name]}
    return Passing({part: size for part, size in parts.items() if size})


def _sums(settings: config.Config) -> int:
    """Partial sums of the gradient that are alive at once: the total, and one a level of a tree."""
    numerics = settings.numerics
    if numerics.reduction == "fast":
        return 1
    passes_of_block = max(1, numerics.lanes // settings.mesh.data_parallel)
    return 1 + max(0, passes_of_block.bit_length() - 1)


def kept_of_layer(settings: config.Config) -> int:
    """Bytes that one layer's forward pass leaves to its backward pass, of a microbatch.

    XLA keeps what the gradient of each operation reads, unless `model.remat` says that it is
    computed again (model.py).
    """
    model, t = settings.model, settings.mesh.tensor
    compute = FLOAT32_BYTES if settings.precision.policy == "float32" else BFLOAT16_BYTES
    tokens = settings.numerics.microbatch * model.sequence_length
    stream = tokens * model.width // t  # the layer's input, cut over `tensor`
    if model.remat == "full":
        return compute * stream
    heads = tokens * model.num_heads * model.head_size // t
    keys = 2 * tokens * max(1, model.num_key_value_heads // t) * model.head_size
    inner = tokens * model.feed_forward_size // t
    into = 2 if model.is_gated else 1
    products = heads + keys + into * inner
    if model.remat == "dots":
        return compute * (stream + products)
    # Norms' results, made whole; one serves both branches of a parallel block.
    normed = tokens * model.width * (1 if model.block == "parallel" else 2)
    if model.remat == "attention":
        return compute * (stream + normed + products + heads)
    # Norms, rotations and nonlinearities are float32, and keep their inputs and results.
    wide = 2 * stream + (3 if model.is_gated else 1) * inner
    scores = settings.numerics.microbatch * (model.num_heads // t) * model.sequence_length**2
    of_scores = 0 if model.attention == "splash" else (FLOAT32_BYTES + compute) * scores
    narrow = stream + normed + products + heads + 2 * inner
    return compute * narrow + FLOAT32_BYTES * wide + of_scores
