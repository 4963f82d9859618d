"""Policies: what each stores, and that none of them lets the mesh into the bits of a run."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from palm_jax import config, precision, sharding, step, stream, train
from palm_jax.corpus.reader import Corpus
from palm_jax.record.folder import RunFolder
from palm_jax.replay import replay as replaying

POLICIES = {
    "float32": {},
    "bfloat16": {},
    "bfloat16_pure": {},
    # Overflows at first, then grows.
    "float16": {"precision.loss_scale_initial": 2.0**24, "precision.loss_scale_growth_interval": 2},
    "float8 delayed": {"precision.float8_history": 3},
    "float8 block": {"precision.float8_scaling": "block"},
}
NUM_STEPS = 6


def settings_of(small, policy: str, mesh=(1, 1, 1), **overrides):
    sizes = dict(zip(("mesh.data", "mesh.fsdp", "mesh.tensor"), mesh, strict=True))
    name = policy.split(" ")[0]
    common = {"precision.policy": name, "data.ramp": {"sizes": [16]}}
    return small(**common, **POLICIES[policy], **sizes, **overrides)


def run_steps(settings, num_steps: int):
    program = step.make_program(settings, sharding.make_mesh(settings.mesh), 256)
    state, vitals = program.init(), []
    for index in range(num_steps):
        shape = (stream.batch_size(settings.data.ramp, index), settings.model.sequence_length + 1)
        tokens = np.random.default_rng((7, index)).integers(0, 257, shape).astype(np.int32)
        state, v = program.step(state, program.put(tokens), step.controls())
        vitals.append(v)
    return jax.device_get(state), jax.device_get(vitals)


def as_bytes(tree) -> dict[str, bytes]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): np.asarray(leaf).tobytes() for path, leaf in leaves}


@pytest.fixture(scope="module")
def reference(small):
    """States and vitals on one device, by policy."""
    known = {}

    def get(policy: str):
        if policy not in known:
            known[policy] = run_steps(settings_of(small, policy), NUM_STEPS)
        return known[policy]

    return get


# --- the same bits on any mesh ---

# float32 and bfloat16 have more meshes in test_step.py.
SLOW = [
    ("float8 delayed", (1, 8, 1)),
    ("float8 block", (2, 2, 1)),
]
CASES = [("float16", (2, 2, 1)), *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]


@pytest.mark.parametrize(("policy", "mesh"), CASES)
def test_every_policy_has_the_same_bits_on_any_mesh(small, reference, policy, mesh):
    wanted_state, wanted_vitals = reference(policy)
    state, vitals = run_steps(settings_of(small, policy, mesh), NUM_STEPS)
    assert as_bytes(vitals) == as_bytes(wanted_vitals)
    assert as_bytes(state) == as_bytes(wanted_state)


def test_the_float16_comparison_has_overflows_and_updates_in_it(reference):
    _, vitals = reference("float16")
    applied = [bool(v["applied"]) for v in vitals]
    assert not applied[0]
    assert any(applied)
    assert len({float(v["loss_scale"]) for v in vitals}) > 1


@pytest.mark.parametrize("policy", ["float8 delayed"])
@pytest.mark.slow
def test_every_policy_resumes_and_replays(small, tmp_path, policy):
    settings = settings_of(small, policy, **{"steps": 10})
    straight = train.train(settings, tmp_path / "straight")
    train.train(settings.model_copy(update={"steps": 5}), tmp_path / "run")
    moved = settings.model_copy(update={"mesh": config.Mesh(data=2, fsdp=2)})
    resumed = train.train(moved, tmp_path / "run")
    assert resumed.state_digest == straight.state_digest
    run = RunFolder(tmp_path / "run")
    with Corpus.open(run.config().data.corpus) as corpus:
        found = replaying.replay(run, 2, 9, corpus=corpus, mesh=config.Mesh(fsdp=8))
    assert found.identical, found.first_difference


@pytest.mark.parametrize("policy", ["bfloat16", "float16", "float8 delayed"])
@pytest.mark.slow
def test_every_policy_is_near_float32_and_splits_over_tensor(small, reference, policy):
    _, (wanted, *_) = reference("float32")
    scale = {"precision.loss_scale": 2.0**12} if policy == "float16" else {}
    for mesh in [(1, 1, 1), (2, 2, 2)]:
        _, (vitals,) = run_steps(settings_of(small, policy, mesh, **scale), 1)
        np.testing.assert_allclose(vitals["loss"], wanted["loss"], rtol=5e-3)
        np.testing.assert_allclose(vitals["gradient_norm"], wanted["gradient_norm"], rtol=0.05)


# --- what is stored ---


def floating_dtypes(tree) -> set[str]:
    return {str(x.dtype) for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("optimizer", ["adafactor", "adamw"])
def test_only_one_policy_stores_its_state_in_bfloat16(small, policy, optimizer):
    settings = settings_of(small, policy, **{"optimizer": {"name": optimizer}})
    shapes = step.make_program(settings, sharding.make_mesh(settings.mesh), 256).state_shapes
    wanted = {"bfloat16" if policy == "bfloat16_pure" else "float32"}
    assert floating_dtypes(shapes.params) == floating_dtypes(shapes.optimizer) == wanted


def test_masters_take_updates_that_bfloat16_swallows():
    """Weight 1, a hundred updates of -1e-3."""
    stored = {name: {"scale_D": jnp.ones(4, name)} for name in ("bfloat16", "float32")}
    update = {"scale_D": jnp.full(4, -1e-3)}
    for name in stored:
        for _ in range(100):
            changed = optax.apply_updates(precision.wide(stored[name]), update)
            stored[name] = precision.stored(changed, jnp.dtype(name))
    assert np.all(np.asarray(stored["bfloat16"]["scale_D"]) == 1)
    np.testing.assert_allclose(stored["float32"]["scale_D"], 0.9, atol=1e-3)


@pytest.mark.parametrize(
    "policy", [pytest.param("bfloat16", marks=pytest.mark.slow), "bfloat16_pure"]
)
def test_norm_scales_at_one_move_only_with_masters(small, policy):
    """Adam's first updates are the rate, 1e-3, and its decay: below half a spacing at one."""
    adam = {"optimizer": {"name": "adamw"}, "schedule": {"kind": "palm", "peak": 1e-3}}
    settings = settings_of(small, policy, **adam)
    program = step.make_program(settings, sharding.make_mesh(settings.mesh), 256)
    state = program.init()
    layers = state.params["layers"] | {
        "norm_scale_D": jnp.ones_like(state.params["layers"]["norm_scale_D"])
    }
    state = jax.device_put(
        state.replace(params=state.params | {"layers": layers}),
        jax.tree.map(lambda x: x.sharding, program.state_shapes),
    )
    tokens = np.random.default_rng(0).integers(0, 257, (16, 9)).astype(np.int32)
    for _ in range(3):
        state, vitals = program.step(state, program.put(tokens), step.controls())
        assert vitals["applied"]
    scales = np.asarray(state.params["layers"]["norm_scale_D"], np.float32)
    if policy == "bfloat16_pure":
        assert np.all(scales == 1)
    else:
        assert np.all(scales != 1)


@pytest.mark.parametrize(
    ("policy", "platform", "kind", "emulated"),
    [
        ("float8", "cpu", "cpu", True),
        ("float8", "tpu", "TPU v5p", True),
        ("float8", "gpu", "NVIDIA H100 80GB HBM3", False),
        ("float16", "tpu", "TPU v4", True),
        ("float16", "cpu", "cpu", False),
        ("bfloat16", "tpu", "TPU v4", False),
        ("float32", "cpu", "cpu", False),
    ],
)
def test_emulation_is_told(policy, platform, kind, emulated):
    told = precision.is_emulated(policy, platform, kind)
    assert (told is not None) == emulated
    if told:
        assert f"precision.policy={policy}" in told


@pytest.mark.parametrize(
    "policy", ["bfloat16_pure", pytest.param("float16", marks=pytest.mark.slow), "float8 delayed"]
)
def test_a_state_of_one_policy_becomes_one_of_another(small, policy):
    given = settings_of(small, policy, (1, 2, 1))
    state = step.make_program(given, sharding.make_mesh(given.mesh), 256).init()
    for other in POLICIES:
        settings = settings_of(small, other, (1, 2, 1))
        program = step.make_program(settings, sharding.make_mesh(settings.mesh), 256)
        adopted = program.adopted(state)
        for x, shape in zip(
            jax.tree.leaves(adopted), jax.tree.leaves(program.state_shapes), strict=True
        ):
            assert (x.shape, x.dtype, x.sharding) == (shape.shape, shape.dtype, shape.sharding)
        if other == policy:
            assert as_bytes(adopted) == as_bytes(state)
        table, before = adopted.params["embedding_VD"], state.params["embedding_VD"]
        np.testing.assert_array_equal(
            np.asarray(table), np.asarray(before).astype(table.dtype), strict=True
        )
