"""Does a pod do the arithmetic of a part of it? XLA:TPU's own modules of one step, compared.

Compiles canonical steps for slices of several sizes, without a TPU, and counts the operations on
floating numbers. Equal counts are evidence for equal bits, not proof; what differs is named.
"""

from __future__ import annotations

import collections
import os
import sys

from palm_jax import config, modules
from palm_jax.tpu import topologies

# (topology, data, fsdp), all with tensor 4: more replicas, then more slices of the parameters.
SLICES = [("v4:2x2x4", 1, 4), ("v4:2x4x4", 2, 4), ("v4:4x4x4", 4, 4), ("v4:4x4x4", 1, 16)]
# What moves numbers and computes none; beginnings of opcodes.
MOVES = (
    "all-", "async", "bitcast", "broadcast", "call", "collective", "concatenate", "conditional",
    "constant", "copy", "custom-call", "dynamic", "fusion", "gather", "get-tuple", "iota", "opt",
    "pad", "parameter", "partition", "recv", "reshape", "scatter", "send", "slice", "transpose",
    "tuple", "while",
)  # fmt: skip


def arithmetic(module: modules.Module) -> collections.Counter[str]:
    counts: collections.Counter[str] = collections.Counter()
    for computation in module.computations.values():
        for instruction in computation.instructions.values():
            kinds = {shape.element_type for shape in instruction.shapes}
            if kinds & {"f32", "bf16"} and not instruction.opcode.startswith(MOVES):
                counts[instruction.opcode] += 1
    return counts


def main(overrides: list[str]) -> None:
    os.environ.update(topologies.environment())

    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    from palm_jax import sharding, step
    from palm_jax.tpu.meshes import physical_mesh

    found = []
    for name, data, fsdp in SLICES:
        settings = config.load(
            "configs/palm_8b.yaml",
            [
                f"mesh={{data: {data}, fsdp: {fsdp}, tensor: 4}}",
                "numerics={lanes: 16, microbatch: 1, reduction: canonical}",
                "data.ramp={starts: [0], sizes: [64]}",
                "model.remat=full",
                *overrides,
            ],
        )
        shape = {"data": data, "fsdp": fsdp, "tensor": 4}
        mesh = physical_mesh(topologies.parse(name).devices(), shape)
        program = step.make_program(settings, mesh, end_of_document=0)
        width, length = settings.mesh.data_parallel, settings.model.sequence_length
        batch = jax.ShapeDtypeStruct(
            (64 // width, width, 1, length + 1), jnp.int32, sharding=sharding.batch_sharding(mesh)
        )
        scalar = jax.ShapeDtypeStruct(
            (), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec())
        )
        lowered = program.traceable_step.lower(
            program.state_shapes, batch, step.Controls(scalar, scalar)
        )
        text = lowered.compile().as_text()
        found.append((name, data, fsdp, modules.without_devices(text), modules.read(text)))
    _, _, _, first_text, first = found[0]
    wanted = arithmetic(first)
    print(f"libtpu {topologies.libtpu_version()}; against {SLICES[0]}:")
    for name, data, fsdp, text, module in found[1:]:
        counts = arithmetic(module)
        differing = {
            opcode: (wanted[opcode], counts[opcode])
            for opcode in sorted(wanted | counts)
            if wanted[opcode] != counts[opcode]
        }
        same_text = "same text" if text == first_text else "other text"
        contractions = first.contractions(executed=False) == module.contractions(executed=False)
        print(
            f"{name} data {data} fsdp {fsdp}: {same_text}; contractions "
            f"{'the same' if contractions else 'differ'}; operations that differ: {differing}"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
