"""The loss scale's rules against plain loops, and what a step does with it."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from palm_jax import config, sharding, step, stream, train
from palm_jax.corpus.reader import Corpus
from palm_jax.precision import loss_scale
from palm_jax.record import logbook
from palm_jax.record.folder import RunFolder
from palm_jax.replay import replay as replaying

LENGTH = 64


def numbers(**given) -> config.Precision:
    return config.Precision(
        policy="float16", **{f"loss_scale_{name}": value for name, value in given.items()}
    )


PYTORCH = numbers(floor=2.0**-40)
JMP = numbers(initial=2.0**15)
MEGATRON = numbers(initial=2.0**32, growth_interval=1000, hysteresis=2)


@functools.cache
def walker(settings: config.Precision):
    def one(state, finite):
        state = loss_scale.after(state, finite, settings)
        return state, state

    return jax.jit(lambda finite: jax.lax.scan(one, loss_scale.init(settings), finite)[1])


def walk(settings: config.Precision, finite: list[bool]) -> list[tuple]:
    """The state after each step."""
    padded = finite + [True] * (-len(finite) % LENGTH)
    columns = [np.asarray(x).tolist() for x in walker(settings)(np.array(padded))]
    return list(zip(*columns, strict=True))[: len(finite)]


def plain_loop(settings: config.Precision, finite: list[bool]) -> list[tuple]:
    """Megatron's rules with a ceiling, of which PyTorch's and JMP's are cases."""
    scale, clean, credit, at_floor = (
        settings.loss_scale_initial, 0, settings.loss_scale_hysteresis, 0,
    )  # fmt: skip
    states = []
    for was_finite in finite:
        if was_finite:
            at_floor = 0
            clean += 1
            if clean == settings.loss_scale_growth_interval:
                clean, credit = 0, settings.loss_scale_hysteresis
                scale *= settings.loss_scale_factor
                if scale > settings.loss_scale_ceiling:
                    scale = settings.loss_scale_ceiling
        else:
            at_floor = at_floor + 1 if scale == settings.loss_scale_floor else 0
            clean = 0
            credit -= 1
            if credit <= 0:
                credit = 0
                scale /= settings.loss_scale_factor
                if scale < settings.loss_scale_floor:
                    scale = settings.loss_scale_floor
        states.append((scale, clean, credit, at_floor))
    return states


SETTINGS = [
    numbers(initial=4.0, ceiling=16.0, growth_interval=3),
    numbers(initial=64.0, ceiling=128.0, growth_interval=2, factor=4.0, floor=0.5),
    numbers(initial=8.0, ceiling=8.0, growth_interval=4, hysteresis=3),
    numbers(growth_interval=1),
]


@given(st.sampled_from(SETTINGS), st.lists(st.booleans(), max_size=LENGTH))
def test_the_scale_walks_as_a_plain_loop_does(settings, finite):
    assert walk(settings, finite) == plain_loop(settings, finite)


@pytest.mark.parametrize(
    ("settings", "finite", "scale"),
    [
        (numbers(initial=2.0**24), [False] * 5, 2.0**19),
        (MEGATRON, [False] * 5, 2.0**28),  # the first is forgiven
        (MEGATRON, [False] + [True] * 1000 + [False], 2.0**33),  # and again once it grew
        (MEGATRON, [False] + [True] * 999 + [False], 2.0**31),  # but not by clean steps
        (JMP, [True] * 1999, 2.0**15),
        (JMP, [True] * 2000, 2.0**16),
        (PYTORCH, [True] * 1999 + [False], 2.0**15),
        (PYTORCH, [False] * 20, 2.0**-4),  # it has no floor
        (JMP, [False] * 20, 1.0),
    ],
)
def test_walks_of_other_libraries(settings, finite, scale):
    if settings is MEGATRON:
        settings = settings.model_copy(update={"loss_scale_ceiling": 2.0**40})
    assert walk(settings, finite)[-1][0] == scale


def test_the_scale_settles_below_what_the_largest_gradient_allows():
    state, settings = loss_scale.init(numbers(initial=2.0**24)), numbers()
    for _ in range(10):
        with np.errstate(over="ignore"):
            finite = np.isfinite(np.float16(2.0 * np.float32(state.scale)))
        state = loss_scale.after(state, jnp.asarray(finite), settings)
    assert float(state.scale) == 2.0**14


def test_the_scale_stops_growing_at_its_ceiling():
    settings = numbers(growth_interval=1)
    scales = [state[0] for state in walk(settings, [True] * 200)]
    assert scales[-1] == max(scales) == settings.loss_scale_ceiling == 2.0**32


def test_a_number_is_a_scale_that_stays():
    settings = config.Precision(policy="float16", loss_scale=1024.0)
    states = walk(settings, [True] * 3 + [False] * 5)
    assert {state[0] for state in states} == {1024.0}
    assert states[-1][3] == 5


@pytest.mark.parametrize("policy", ["float32", "bfloat16", "bfloat16_pure", "float8"])
def test_other_policies_have_no_loss_scale(policy):
    assert loss_scale.init(config.Precision(policy=policy)) is None


def test_a_run_gives_up_after_its_patience_at_the_floor():
    settings = numbers(initial=4.0, patience=3)
    counts = [state[3] for state in walk(settings, [False] * 5)]
    assert counts == [0, 0, 1, 2, 3]
    assert loss_scale.gave_up(2, settings) is None
    assert "smallest loss scale, 1" in loss_scale.gave_up(3, settings)


# --- in a step ---


def tokens_of(settings, index: int) -> np.ndarray:
    shape = (stream.batch_size(settings.data.ramp, index), settings.model.sequence_length + 1)
    return np.random.default_rng((7, index)).integers(0, 257, shape).astype(np.int32)


def program_for(settings):
    return step.make_program(settings, sharding.make_mesh(settings.mesh), 256)


def half(small, **overrides):
    return small(**{"precision.policy": "float16"}, **overrides)


def as_bytes(tree) -> dict[str, bytes]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): np.asarray(leaf).tobytes() for path, leaf in leaves}


@pytest.fixture(scope="module")
def gradient_of(small):
    """(policy, scale) -> the gradient of a batch as `step.gradients` returns it, on one device."""

    @functools.cache
    def function(policy: str):
        settings = small(**{"precision.policy": policy})
        program = program_for(settings)
        params, batch = program.init().params, program.put(tokens_of(settings, 0))
        mapped = jax.shard_map(
            lambda params, tokens, scale: step.gradients(
                params, tokens, settings, 256, scale=scale
            )[0],
            mesh=program.mesh,
            in_specs=jax.sharding.PartitionSpec(),
            out_specs=jax.sharding.PartitionSpec(),
            check_vma=False,
        )
        compiled = jax.jit(mapped)
        return lambda scale: jax.device_get(compiled(params, batch, jnp.float32(scale)))

    return lambda policy, scale: function(policy)(scale)


def test_a_power_of_two_leaves_the_bits_of_a_float32_gradient(gradient_of):
    plain, scaled = gradient_of("float32", 1), gradient_of("float32", 2.0**-9)
    unscaled = jax.tree.map(lambda g: g * np.float32(2.0**9), scaled)
    assert as_bytes(unscaled) == as_bytes(plain)


def test_without_a_scale_small_gradients_are_lost(gradient_of):
    """Of the sum over 64 targets, of their mean, and of the mean over 2^24 targets."""
    wanted = gradient_of("float32", 1)
    errors = {}
    for scale in (1.0, 2.0**-6, 2.0**-24):
        different = [
            np.linalg.norm(np.ravel(f / scale - w)) / np.linalg.norm(np.ravel(w))
            for f, w in zip(
                jax.tree.leaves(gradient_of("float16", scale)), jax.tree.leaves(wanted), strict=True
            )
        ]
        errors[scale] = max(different)
    assert max(errors[1.0], errors[2.0**-6]) < 0.02
    assert errors[2.0**-24] > 0.5


@pytest.mark.slow
def test_clipping_sees_the_gradient_that_float32_has(small):
    """Scale 2^15, clip 0.5: norm and update are those of float32, to float16's rounding."""
    common = {"optimizer.clip_norm": 0.5, "optimizer.name": "adamw", "schedule.peak": 0.003}
    found = {}
    for policy in ("float32", "float16"):
        settings = small(**common, **{"precision.policy": policy, "precision.loss_scale": 2.0**15})
        program = program_for(settings)
        before = jax.device_get(program.init().params)
        after, vitals = program.step(
            program.init(), program.put(tokens_of(settings, 0)), step.controls()
        )
        change = jax.tree.map(lambda new, old: np.asarray(new) - old, after.params, before)
        moments = jax.device_get(after.optimizer["moments"].mu)
        found[policy] = jax.device_get(vitals), change, moments
    (wanted, change, moments), (half_vitals, half_change, half_moments) = found.values()
    assert wanted["gradient_norm"] > 0.5  # it is clipped
    np.testing.assert_allclose(half_vitals["gradient_norm"], wanted["gradient_norm"], rtol=2e-3)
    np.testing.assert_allclose(half_vitals["update_rms"], wanted["update_rms"], rtol=2e-3)
    for one, other in zip(jax.tree.leaves(half_moments), jax.tree.leaves(moments), strict=True):
        assert np.linalg.norm(one - other) < 0.01 * np.linalg.norm(other)
    # Adam's first update is close to the sign of a gradient: elements near zero may flip.
    for one, other in zip(jax.tree.leaves(half_change), jax.tree.leaves(change), strict=True):
        assert np.mean(np.abs(one - other) > 0.1 * 0.003) < 0.01


@pytest.fixture(scope="module")
def in_half(small):
    return program_for(half(small))


def test_an_overflow_changes_nothing_but_the_data_step_and_the_scale(in_half):
    state = in_half.init()
    too_large = state.loss_scale._replace(scale=jnp.float32(2.0**32))
    state = jax.device_put(
        state.replace(loss_scale=too_large),
        jax.tree.map(lambda x: x.sharding, in_half.state_shapes),
    )
    before = as_bytes(state)
    state, vitals = in_half.step(
        state, in_half.put(tokens_of(in_half.settings, 0)), step.controls()
    )
    after = as_bytes(state)
    assert not np.isfinite(vitals["gradient_norm"])
    assert not vitals["applied"]
    assert vitals["loss_scale"] == 2.0**32
    changed = {path for path, content in after.items() if content != before[path]}
    assert changed == {".step", ".loss_scale.scale", ".loss_scale.credit"}
    assert state.loss_scale.scale == 2.0**31


def test_an_update_skipped_for_its_norm_is_a_clean_one_for_the_scale(in_half):
    tokens = in_half.put(tokens_of(in_half.settings, 0))
    state, vitals = in_half.step(in_half.init(), tokens, step.controls(skip_above=1e-6))
    assert not vitals["applied"]
    assert (int(state.loss_scale.clean), int(vitals["skips_at_floor"])) == (1, 0)


@pytest.fixture(scope="module")
def walking(small, tmp_path_factory):
    """A run whose scale overflows at first and grows every four clean steps; and its settings."""
    settings = half(
        small,
        **{
            "precision.loss_scale_initial": 2.0**22,
            "precision.loss_scale_growth_interval": 4,
            "steps": 14,
            "data.ramp": {"sizes": [8]},
        },
    )
    path = tmp_path_factory.mktemp("walking") / "run"
    return settings, path, train.train(settings, path)


def scales(path) -> list[float]:
    records = logbook.read(path).records
    return [r["computed"]["loss_scale"] for r in records if r["event"] == "step"]


def test_a_resumed_run_has_the_scales_of_an_uninterrupted_one(walking, tmp_path):
    settings, straight, outcome = walking
    found = scales(straight)
    grown = [i for i, (a, b) in enumerate(itertools.pairwise(found)) if b > a]
    assert found[1] < found[0]  # it overflowed
    assert grown  # and grew
    between = grown[0] - 1  # two clean steps into an interval
    stopped = settings.model_copy(update={"steps": between})
    train.train(stopped, tmp_path / "run")
    resumed = train.train(settings, tmp_path / "run")
    assert scales(tmp_path / "run") == found
    assert resumed.state_digest == outcome.state_digest


@pytest.mark.slow
def test_a_replay_computes_the_scale_again(walking):
    _, path, _ = walking
    run = RunFolder(path)
    with Corpus.open(run.config().data.corpus) as corpus:
        found = replaying.replay(run, 5, 12, corpus=corpus, mesh=config.Mesh(data=2))
    assert found.identical, found.first_difference
