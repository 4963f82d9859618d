"""The step: what it computes, and that its bits do not depend on the mesh."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from palm_jax import loss, model, modules, sharding, step, stream

END = 256


def program_for(settings):
    return step.make_program(settings, sharding.make_mesh(settings.mesh), END)


def tokens_of(settings, index: int) -> np.ndarray:
    size = stream.batch_size(settings.data.ramp, index)
    shape = (size, settings.model.sequence_length + 1)
    return np.random.default_rng((7, index)).integers(0, 257, shape).astype(np.int32)


def as_bytes(tree) -> dict[str, bytes]:
    return {
        jax.tree_util.keystr(path): np.asarray(leaf).tobytes()
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def run_steps(settings, num_steps: int):
    program = program_for(settings)
    state, vitals, controls = program.init(), [], step.controls()
    for index in range(num_steps):
        state, v = program.step(state, program.put(tokens_of(settings, index)), controls)
        vitals.append(v)
    return state, jax.device_get(vitals)


@pytest.fixture(scope="module")
def reference(request):
    """States and vitals of 12 ramped steps on one device, by settings."""
    known = {}

    def get(settings):
        key = settings.model_dump_json()
        if key not in known:
            known[key] = run_steps(settings, 12)
        return known[key]

    return get


# --- what a step computes ---


def unsharded_objective(params, tokens, settings):
    """The mean objective over all tokens at once, without microbatches or gathers."""
    hidden = model.hidden(
        params, tokens[:, :-1], settings=settings.model, dtype=jnp.dtype(jnp.float32)
    )
    logits = loss.logits(hidden, params["embedding_VD"], settings.model.vocabulary_size)
    sums = loss.sums_by_sequence(logits, tokens[:, 1:])
    count = tokens[:, 1:].size
    return (sums.cross_entropy.sum() + settings.model.z_loss * sums.z.sum()) / count


@pytest.mark.parametrize("mesh", [{"data": 1}, {"data": 4, "fsdp": 2}])
def test_loss_and_gradient_norm_are_those_of_the_whole_batch_at_once(small, mesh):
    settings = small(**{f"mesh.{axis}": size for axis, size in mesh.items()})
    program = program_for(settings)
    params = jax.device_get(program.init().params)
    tokens = tokens_of(settings, 5)  # 16 sequences: two blocks of eight microbatches
    _, vitals = program.step(program.init(), program.put(tokens), step.controls())
    objective = jax.jit(jax.value_and_grad(unsharded_objective), static_argnums=2)
    value, gradient = objective(params, tokens, settings)
    norm = np.sqrt(sum(np.square(g, dtype=np.float64).sum() for g in jax.tree.leaves(gradient)))
    # 1e-5: float32 sums in another order.
    np.testing.assert_allclose(vitals["loss"], value, rtol=1e-5)
    np.testing.assert_allclose(vitals["gradient_norm"], norm, rtol=1e-5)
    parameters = [np.square(p, dtype=np.float64).sum() for p in jax.tree.leaves(params)]
    np.testing.assert_allclose(vitals["parameter_norm"], np.sqrt(sum(parameters)), rtol=1e-5)
    assert int(vitals["targets"]) == 16 * 8


def test_z_loss_is_reported_apart_and_adds_up(small):
    _, (vitals, *_) = run_steps(small(), 1)
    assert vitals["loss"] == vitals["cross_entropy"] + vitals["z_loss"]
    # log Z of a tied, unit-variance embedding is far from zero at the start.
    assert vitals["z_loss"] > 1e-4


def test_update_rms_is_that_of_the_change_in_parameters(small):
    settings = small()
    program = program_for(settings)
    before = jax.device_get(program.init().params)
    state, vitals = program.step(
        program.init(), program.put(tokens_of(settings, 0)), step.controls()
    )
    changes = [
        np.ravel(new.astype(np.float64) - old)
        for new, old in zip(
            jax.tree.leaves(jax.device_get(state.params)), jax.tree.leaves(before), strict=True
        )
    ]
    rms = np.sqrt(np.mean(np.square(np.concatenate(changes))))
    # 1e-3: parameters near one hold changes of 1e-4 to some 1e-3 of their size in float32.
    np.testing.assert_allclose(vitals["update_rms"], rms, rtol=1e-3)


def test_rate_scale_scales_the_rate_in_force(small):
    settings = small()
    program = program_for(settings)
    _, vitals = program.step(
        program.init(), program.put(tokens_of(settings, 0)), step.controls(rate_scale=0.25)
    )
    assert float(vitals["rate"]) == np.float32(0.01) * np.float32(0.25)


def test_rate_follows_the_whole_batch_and_independent_decay_the_schedule_alone(small):
    settings = small(
        optimizer={"name": "adamw", "independent_decay": True, "weight_decay": 0.5},
        schedule={
            "kind": "linear",
            "peak": 0.01,
            "warmup_steps": 4,
            "decay_steps": 9,
            "batch_size_reference": 2,
        },
        **{"mesh.data": 2, "mesh.fsdp": 2},
    )
    program = program_for(settings)
    _, vitals = program.step(
        program.init(), program.put(tokens_of(settings, 0)), step.controls(rate_scale=0.25)
    )
    # The first of four updates of warm-up; eight sequences, two on each device.
    np.testing.assert_allclose(vitals["rate"], 0.01 / 4 * 0.25 * 2, rtol=1e-6)
    np.testing.assert_allclose(vitals["weight_decay"], 0.5 / 4, rtol=1e-6)


@pytest.mark.parametrize("reason", ["above the limit", "not finite"])
def test_skipped_update_changes_nothing_but_the_data_step(small, reason):
    settings = small()
    program = program_for(settings)
    controls = step.controls()
    state, _ = program.step(program.init(), program.put(tokens_of(settings, 0)), controls)
    if reason == "not finite":
        params = dict(state.params)
        params["embedding_VD"] = params["embedding_VD"].at[0, 0].set(jnp.inf)
        state = state.replace(params=params)
    else:
        controls = step.controls(skip_above=1e-6)
    before = as_bytes(state)
    after, vitals = program.step(state, program.put(tokens_of(settings, 1)), controls)
    assert not vitals["applied"]
    different = {path for path, content in as_bytes(after).items() if content != before[path]}
    assert different == {".step"}
    assert int(after.step) == 2
    assert int(after.schedule_step) == 1


def test_applied_update_advances_every_count(small):
    state, vitals = run_steps(small(), 3)
    assert all(v["applied"] for v in vitals)
    assert int(state.step) == int(state.schedule_step) == 3
    counts = [
        int(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(state.optimizer)
        if "count" in jax.tree_util.keystr(path)
    ]
    assert counts
    assert set(counts) == {3}


# --- the same bits on any mesh ---

VARIANTS = {
    "float32": {},
    "bfloat16": {"precision.policy": "bfloat16"},
    "adamw": {"optimizer.name": "adamw", "schedule.peak": 0.003},
}
# Each axis alone, whole and in part, and both; what AdamW does elementwise needs few meshes.
SLOW = [
    ("float32", (1, 8)),
    ("bfloat16", (8, 1)),
    ("bfloat16", (2, 4)),
    ("adamw", (2, 2)),
]
CASES = [("float32", (4, 2)), *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]


@pytest.mark.parametrize(("variant", "mesh"), CASES)
def test_twelve_ramped_steps_have_the_same_bits_on_any_mesh(small, reference, variant, mesh):
    wanted_state, wanted_vitals = reference(small(**VARIANTS[variant]))
    meshed = small(**VARIANTS[variant], **{"mesh.data": mesh[0], "mesh.fsdp": mesh[1]})
    state, vitals = run_steps(meshed, 12)
    assert as_bytes(vitals) == as_bytes(wanted_vitals)
    assert as_bytes(state) == as_bytes(wanted_state)


@pytest.mark.slow
def test_other_lanes_give_other_bits(small, reference):
    """The comparison above can fail: a different tree is a different run."""
    _, eight = reference(small())
    _, four = run_steps(small(**{"numerics.lanes": 4}), 12)
    assert as_bytes(eight) != as_bytes(four)
    np.testing.assert_allclose([v["loss"] for v in eight], [v["loss"] for v in four], rtol=1e-4)


def on_axes(small, mesh, **overrides):
    sizes = zip(("mesh.data", "mesh.fsdp", "mesh.tensor"), mesh, strict=True)
    return small(**dict(sizes), **overrides)


CUBES = [pytest.param(m, marks=pytest.mark.slow) for m in [(1, 4, 2), (1, 1, 2)]]


@pytest.mark.parametrize("mesh", [*CUBES, (2, 2, 2)])
def test_first_steps_have_the_same_loss_on_any_mesh(small, reference, mesh):
    _, wanted = reference(small())
    _, vitals = run_steps(on_axes(small, mesh), 3)
    # 1e-6 at the first step: contractions are split over `tensor`, so last bits differ.
    np.testing.assert_allclose(vitals[0]["loss"], wanted[0]["loss"], rtol=1e-6)
    np.testing.assert_allclose(
        [v["loss"] for v in vitals], [v["loss"] for v in wanted[:3]], rtol=1e-5
    )
    np.testing.assert_allclose(
        [v["gradient_norm"] for v in vitals], [v["gradient_norm"] for v in wanted[:3]], rtol=1e-4
    )


@pytest.mark.parametrize(
    "options",
    [
        {"model.qk_norm": True, "model.norm": "layernorm", "model.isolate_documents": True},
        {"model.tied_embedding": False, "model.remat": "full", "numerics.loss_chunk": 4},
        {"numerics.reduction": "fast", "model.remat": "attention"},
    ],
)
@pytest.mark.slow
def test_every_part_of_the_model_can_be_split(small, options):
    _, (alone, *_) = run_steps(small(**options), 1)
    _, (split, *_) = run_steps(on_axes(small, (1, 2, 2), **options), 1)
    np.testing.assert_allclose(split["loss"], alone["loss"], rtol=1e-6)
    np.testing.assert_allclose(split["gradient_norm"], alone["gradient_norm"], rtol=1e-5)
    np.testing.assert_allclose(split["update_rms"], alone["update_rms"], rtol=1e-4)


@pytest.mark.parametrize(
    "mesh", [(1, 4, 2), *(pytest.param(m, marks=pytest.mark.slow) for m in [(1, 8, 1)])]
)
def test_initial_state_has_the_same_bits_on_any_mesh(small, mesh):
    meshed = on_axes(small, mesh)
    assert as_bytes(program_for(meshed).init()) == as_bytes(program_for(small()).init())


def test_gradients_cross_devices_once_and_slice_by_slice(small):
    """Which collectives a step has: one too many made steps of other trainers several times
    slower, and no number shows it."""
    settings = on_axes(small, (2, 4, 1), **{"log.vitals": "all"})
    program = program_for(settings)
    batch = program.put(tokens_of(settings, 5))
    lowered = program.traceable_step.lower(program.state_shapes, batch, step.controls())
    module = modules.read(lowered.compile().as_text())
    traffic = module.traffic({"data": 2, "fsdp": 4, "tensor": 1})
    num_passes = 16 // 8
    params = jax.tree_util.tree_leaves_with_path(program.state_shapes.params)
    along_width = sum(x.size for path, x in params if "D" in sharding.logical_axes(path, x.ndim))
    exchanged = traffic["all-to-all", ("fsdp",)]
    assert exchanged.operand_bytes == num_passes * 4 * along_width
    gathered = traffic["all-gather", ("fsdp",)].operand_bytes
    added = traffic["all-gather", ("data",)].operand_bytes
    # Each device sends its quarter of the parameters (of the embedding once: XLA takes it out of
    # the loop over passes), then of their gradients; the rest are the sums over matrices.
    embedding = program.state_shapes.params["embedding_VD"].size
    once = num_passes * (along_width - embedding) + embedding
    assert 0 <= gathered - once < 0.05 * once
    assert 0 <= added - num_passes * along_width < 0.05 * num_passes * along_width
    # How often each token occurs: integers, which add exactly in any order.
    assert traffic["all-reduce", ("data", "fsdp")].operand_bytes == 4 * embedding / 16
    assert {kind for kind, _ in traffic} == {"all-to-all", "all-gather", "all-reduce"}


def test_every_leaf_lives_where_the_rules_say(small):
    settings = small(**{"mesh.fsdp": 4, "mesh.tensor": 2})
    state = program_for(settings).init()
    held = {
        name: leaf.addressable_shards[0].data.size / leaf.size
        for name, leaf in state.params["layers"].items()
    }
    assert held["w_gate_DF"] == held["w_query_DHK"] == 1 / 8
    assert held["w_key_DK"] == held["norm_scale_D"] == 1 / 4  # multi-query: one key head
    second_moment = state.optimizer["second_moment"].v["layers"]["w_gate_DF"]
    assert second_moment.addressable_shards[0].data.size / second_moment.size == 1 / 8


# --- compiled programs ---


def test_one_compilation_a_batch_size(small):
    settings = small(**{"schedule.peak": 0.0123})  # no other test has compiled it
    program = program_for(settings)
    state, controls = program.init(), step.controls()
    batches = [program.put(tokens_of(settings, index)) for index in range(12)]
    compilations = []

    def listen(name: str, seconds: float, **_: object) -> None:
        compilations.append(name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        for batch in batches:
            state, _ = program.step(state, batch, controls)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    counted = [name for name in compilations if name.endswith("backend_compile_duration")]
    assert len(counted) == len(settings.data.ramp.sizes) == 2


def test_compiled_program_does_not_grow_with_depth(small):
    def operations(num_layers: int) -> int:
        settings = small(**{"model.num_layers": num_layers})
        program = program_for(settings)
        batch = program.put(tokens_of(settings, 0))
        lowered = program.traceable_step.lower(program.state_shapes, batch, step.controls())
        return lowered.as_text().count(" = ")

    # The norms over all parameters add up one number a layer.
    assert operations(16) <= operations(2) * 1.5


def test_step_moves_nothing_between_host_and_device(small):
    settings = small()
    program = program_for(settings)
    state, controls = program.init(), step.controls()
    batch = program.put(tokens_of(settings, 0))
    with jax.transfer_guard("disallow"):
        state, vitals = program.step(state, batch, controls)
        jax.block_until_ready(vitals)


def test_state_is_donated(small):
    settings = small()
    program = program_for(settings)
    state = program.init()
    program.step(state, program.put(tokens_of(settings, 0)), step.controls())
    assert state.params["layers"]["w_gate_DF"].is_deleted()
