"""XLA's modules of a step for 1, 2 and 8 devices: the same arithmetic, but for the tree's levels.

Where a compiler chooses otherwise for another device count (a reciprocal for a division, another
split of a reduction), the counts of operations differ, and the test names which.
"""

from __future__ import annotations

import collections
import math

import numpy as np
import pytest

from palm_jax import modules, sharding, step

MOVES = {
    "all-gather", "all-to-all", "bitcast", "bitcast-convert", "broadcast", "call", "concatenate",
    "constant", "copy", "dynamic-slice", "dynamic-update-slice", "fusion", "gather",
    "get-tuple-element", "iota", "opt-barrier", "pad", "parameter", "reshape", "slice",
    "transpose", "tuple", "while",
}  # fmt: skip


def arithmetic(settings) -> collections.Counter[str]:
    """How often each operation on floating numbers stands in the optimized module.

    With all vitals, of arrays with more than a number a layer: how often such a few are computed
    depends on what the compiler finds to be equal, which sums over devices are not.
    """
    few = settings.model.num_layers if settings.log.vitals == "all" else 0
    program = step.make_program(settings, sharding.make_mesh(settings.mesh), 256)
    tokens = np.zeros((16, settings.model.sequence_length + 1), np.int32)
    lowered = program.traceable_step.lower(
        program.state_shapes, program.put(tokens), step.controls()
    )
    module = modules.read(lowered.compile().as_text())
    counts: collections.Counter[str] = collections.Counter()
    for computation in module.computations.values():
        for instruction in computation.instructions.values():
            floating = any(s.element_type in ("f32", "bf16") for s in instruction.shapes)
            size = max((math.prod(s.sizes) for s in instruction.shapes), default=0)
            if floating and size > few and instruction.opcode not in MOVES:
                counts[instruction.opcode] += 1
    return counts


def differing(one: collections.Counter[str], other: collections.Counter[str]) -> set[str]:
    return {name for name in one | other if one[name] != other[name]}


@pytest.fixture(scope="module")
def on_one(small):
    known = {}

    def get(**overrides):
        key = tuple(overrides.items())
        if key not in known:
            known[key] = arithmetic(small(**overrides))
        return known[key]

    return get


SLOW = [("bfloat16", "all", (2, 4))]
CASES = [
    ("float32", "basic", (1, 2)),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW),
]


@pytest.mark.parametrize(("policy", "vitals", "mesh"), CASES)
def test_only_the_tree_s_additions_differ(small, on_one, policy, vitals, mesh):
    options = {"precision.policy": policy, "log.vitals": vitals}
    alone = on_one(**options)
    settings = small(**options, **{"mesh.data": mesh[0], "mesh.fsdp": mesh[1]})
    assert {"dot", "multiply", "divide", "reduce", "rsqrt", "exponential"} <= set(alone)
    # One addition a leaf for each level of the tree that crosses devices, instead of a loop's.
    allowed = {"add"}
    if policy == "bfloat16":
        allowed.add("convert")  # XLA:CPU moves bfloat16 between devices as float32, exactly
    assert differing(alone, arithmetic(settings)) <= allowed


@pytest.mark.slow
def test_fast_sums_leave_the_compiler_other_choices(small, on_one):
    """The comparison above can fail."""
    alone = on_one(**{"numerics.reduction": "fast"})
    settings = small(**{"numerics.reduction": "fast", "mesh.fsdp": 8})
    assert differing(alone, arithmetic(settings)) - {"add"}
