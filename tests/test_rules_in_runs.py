"""Every optimizer in every number format: resumed, replayed and on other meshes, the same bits."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from runs import StopAfter

from palm_jax import config, sharding, step
from palm_jax import train as training
from palm_jax.corpus.reader import Corpus
from palm_jax.plan import memory
from palm_jax.record.checkpoints import bytes_of
from palm_jax.record.folder import RunFolder
from palm_jax.replay import replay as replaying

RULES = {
    "adafactor": {"optimizer": {"name": "adafactor"}},
    "factored": {"optimizer": {"name": "adafactor", "factored": True}},
    "adamw": {
        "optimizer": {"name": "adamw", "independent_decay": True, "weight_decay": 1e-4},
        "schedule": {"kind": "linear", "peak": 0.003, "decay_steps": 6},
    },
    "lion": {"optimizer": {"name": "lion"}, "schedule.peak": 0.001},
    "muon": {"optimizer": {"name": "muon", "weight_decay": 0.1}, "schedule.peak": 0.02},
    "sgd": {"optimizer": {"name": "sgd", "nesterov": True}, "schedule.peak": 0.1},
    "soap": {"optimizer": {"name": "soap", "refresh_every": 2}, "schedule.peak": 0.003},
    "sophia": {"optimizer": {"name": "sophia", "refresh_every": 2}, "schedule.peak": 0.001},
}
HUTCHINSON = {"name": "sophia", "refresh_every": 2, "estimator": "hutchinson"}
POLICIES = ("float32", "bfloat16", "bfloat16_pure", "float16", "float8")
ONE_SIZE = {"data.ramp": {"sizes": [8]}}
STEPS = 5


def on(settings: config.Config, data: int, fsdp: int, tensor: int = 1) -> config.Config:
    mesh = config.Mesh(data=data, fsdp=fsdp, tensor=tensor)
    return settings.model_copy(update={"mesh": mesh})


def program_for(settings: config.Config) -> step.Program:
    return step.make_program(settings, sharding.make_mesh(settings.mesh), 256)


def as_bytes(tree) -> dict[str, bytes]:
    return {
        jax.tree_util.keystr(path): np.asarray(leaf).tobytes()
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def steps_from(program: step.Program, state, start: int, stop: int):
    """State and vitals of the last of some steps on made-up tokens."""
    size = program.settings.data.ramp.sizes[0]
    length = program.settings.model.sequence_length
    vitals = None
    for index in range(start, stop):
        rng = np.random.default_rng((7, index))
        tokens = rng.integers(0, 257, (size, length + 1)).astype(np.int32)
        rows = program.rows_here(size)
        state, vitals = program.step(state, program.put(tokens[rows]), step.controls())
    return jax.device_get((state, vitals))


# --- through checkpoints ---


@pytest.mark.parametrize(
    ("rule", "policy", "resumed_on"),
    [
        ("muon", "float32", (1, 1)),
        ("factored", "bfloat16_pure", (1, 1)),
        pytest.param("muon", "bfloat16", (1, 2), marks=pytest.mark.slow),
        pytest.param("factored", "float32", (2, 2), marks=pytest.mark.slow),
        pytest.param("lion", "float16", (2, 1), marks=pytest.mark.slow),
        pytest.param("sgd", "float8", (1, 4), marks=pytest.mark.slow),
        pytest.param("soap", "float32", (2, 2), marks=pytest.mark.slow),
        pytest.param("sophia", "bfloat16_pure", (1, 2), marks=pytest.mark.slow),
    ],
)
def test_run_resumes_from_its_checkpoint_and_replays_bit_for_bit(
    small, tmp_path, rule, policy, resumed_on
):
    settings = small(
        **RULES[rule], **ONE_SIZE, **{"precision.policy": policy, "checkpoint.every": 2}
    ).model_copy(update={"steps": STEPS})
    straight = training.train(settings, tmp_path / "straight")
    training.train(settings, tmp_path / "run", stop_requested=StopAfter(1))
    resumed = training.train(on(settings, *resumed_on), tmp_path / "run")
    assert resumed.state_digest == straight.state_digest
    assert resumed.evaluation == straight.evaluation
    run = RunFolder(tmp_path / "run")
    with Corpus.open(settings.data.corpus) as corpus:
        assert replaying.replay(run, 1, STEPS, corpus=corpus).identical


# --- every format ---


# PaLM's rule meets every format. A rule sees of a format how its arrays are stored, and of float16
# that updates may be left out; so two formats stand for all.
SOME = {
    "factored": ("bfloat16_pure", "float16"),
    "adamw": ("bfloat16_pure", "float16"),
    "lion": ("bfloat16_pure", "float16"),
    "muon": ("bfloat16_pure", "float16"),
    "sgd": ("bfloat16_pure", "float16"),
    "soap": ("float32", "bfloat16_pure"),
    "sophia": ("float16", "float8"),
}
FORMATS = [(rule, policy) for rule in RULES for policy in SOME.get(rule, POLICIES)]


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "policy"), FORMATS)
def test_five_steps_are_finite_and_the_same_again_and_in_two_parts(
    small, monkeypatch, rule, policy
):
    # One program is compared with itself: XLA need not take the time to optimize it.
    monkeypatch.setattr(
        step.precision, "compiler_options", lambda *_: {"xla_backend_optimization_level": 0}
    )
    # One layer, a head, the smallest width that eight lanes divide.
    tiny = {
        "model.num_layers": 1,
        "model.num_heads": 1,
        "model.width": 8,
        "model.head_size": 4,
        # The first scale must not overflow in what are so few steps.
        "precision": {"policy": policy, "loss_scale_initial": 2.0**8, "float8_history": 4},
    }
    program = program_for(small(**RULES[rule], **ONE_SIZE, **tiny))
    state, vitals = steps_from(program, program.init(), 0, STEPS)
    assert vitals["applied"]
    assert np.isfinite(vitals["loss"])
    assert all(np.isfinite(np.float32(x)).all() for x in jax.tree.leaves(state))
    again, _ = steps_from(program, program.init(), 0, STEPS)
    assert as_bytes(again) == as_bytes(state)
    half, _ = steps_from(program, program.init(), 0, 2)
    # Through the host, as through a checkpoint.
    half = jax.tree.map(
        lambda x, like: jax.device_put(x, like.sharding), half, program.state_shapes
    )
    parts, again = steps_from(program, half, 2, STEPS)
    assert as_bytes(parts) == as_bytes(state)
    assert as_bytes(again) == as_bytes(vitals)


# --- meshes ---


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "alone", "meshes"),
    [
        # What acts element by element needs one mesh of each kind, what looks at matrices several.
        *((rule, (1, 1, 1), [(1, 8, 1)]) for rule in ("adamw", "lion", "sgd")),
        *((rule, (1, 1, 1), [(1, 8, 1), (2, 2, 1)]) for rule in ("factored", "muon", "soap")),
        *((rule, (1, 1, 2), [(2, 2, 2)]) for rule in ("factored", "adamw", "muon", "soap")),
    ],
    ids=str,
)
def test_rules_give_the_same_bits_on_any_mesh(small, rule, alone, meshes):
    # Three layers, which no device count divides.
    settings = small(
        **RULES[rule], **ONE_SIZE, **{"model.num_layers": 3, "model.tied_embedding": False}
    )
    program = program_for(on(settings, *alone))
    wanted = as_bytes(steps_from(program, program.init(), 0, STEPS))
    for mesh in meshes:
        program = program_for(on(settings, *mesh))
        assert as_bytes(steps_from(program, program.init(), 0, STEPS)) == wanted


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "alone", "on_mesh"),
    [
        (RULES["sophia"]["optimizer"], (1, 1, 1), (2, 2, 1)),
        (RULES["sophia"]["optimizer"], (1, 1, 2), (1, 4, 2)),
        (HUTCHINSON, (1, 1, 1), (4, 2, 1)),
    ],
    ids=str,
)
def test_estimates_of_curvature_have_the_same_bits_on_any_mesh(small, optimizer, alone, on_mesh):
    settings = small(
        optimizer=optimizer, **ONE_SIZE, **{"model.num_layers": 1, "model.dropout": 0.1}
    )
    found = []
    for mesh in (alone, on_mesh):
        program = program_for(on(settings, *mesh))
        found.append(as_bytes(steps_from(program, program.init(), 0, 3)))
    assert found[0] == found[1]


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["factored", "muon"])
def test_vitals_of_rules_have_the_same_bits_on_any_mesh(small, rule):
    settings = small(**RULES[rule], **ONE_SIZE, **{"log.vitals": "all"})
    found = []
    for mesh in [(1, 1), (2, 2)]:
        program = program_for(on(settings, *mesh))
        _, vitals = steps_from(program, program.init(), 0, 2)
        found.append(vitals)
    assert as_bytes(found[0]) == as_bytes(found[1])
    assert (found[0]["layers/normalised_gradient_rms"] > 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["factored", "muon"])
def test_fast_sums_train_too(small, rule):
    """In another order of sums, and so to other bits of the same numbers."""
    losses = []
    for reduction in ("canonical", "fast"):
        settings = small(**RULES[rule], **ONE_SIZE, **{"numerics.reduction": reduction})
        program = program_for(on(settings, 1, 2, 2))
        _, vitals = steps_from(program, program.init(), 0, 3)
        losses.append(vitals["loss"])
    # Updates of a normalised gradient carry last bits of small ones into the parameters.
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-4)


# --- bytes ---


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("policy", ["float32", "bfloat16_pure"])
def test_planned_state_is_that_of_the_program(small, rule, policy):
    settings = small(
        **RULES[rule],
        **{"precision.policy": policy, "model.qk_norm": True, "model.tied_embedding": False},
    )
    shapes = program_for(on(settings, 1, 4, 2)).state_shapes
    assert memory.state_bytes(settings) == bytes_of(shapes)
    planned = memory.on_each_device(on(settings, 1, 4, 2), sharding.RULES)
    here = sum(
        int(np.prod(x.sharding.shard_shape(x.shape))) * x.dtype.itemsize
        for x in jax.tree.leaves(shapes)
    )
    assert planned.state == here


def test_bytes_per_parameter_of_large_matrices(small):
    wide = {"model.width": 1024, "model.head_size": 256, "model.num_heads": 4}
    found = {
        rule: memory.optimizer_bytes_per_parameter(small(**options, **wide))
        for rule, options in RULES.items()
    }
    assert found.pop("factored") == pytest.approx(4.01, abs=0.01)
    # AdamW's share of Muon: 384 rows of embedding among the kernels.
    assert 4 < found.pop("muon") < 4.2
    # Of each layer's parameters, 14.25 D^2, twice the squares of: D for 7 kernels, H x K = D for 2,
    # K = D / 4 for 2, F = 4 D for 3; of the embedding, which is 0.19 D^2 for each layer, none.
    squares = 2 * (7 + 2 + 2 / 16 + 3 * 16)
    assert found.pop("soap") == pytest.approx(8 + 4 * squares / 14.69, rel=0.02)
    assert found == {"adafactor": 8, "adamw": 8, "lion": 4, "sgd": 4, "sophia": 8}
