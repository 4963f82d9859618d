"""The optimizers against NumPy float64, hand calculation and optax."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from palm_jax import config, optimizer
from palm_jax.optimizer import adafactor, parts

ADAFACTOR = config.Adafactor()
ADAMW = config.AdamW(name="adamw")
NUM_STEPS = 30


def mean_squares(tree: Any) -> Any:
    """Of each matrix of unsharded leaves; below `layers` the first axis counts matrices."""

    def of_leaf(path: Any, leaf: jax.Array) -> jax.Array:
        stacked = any(entry.key == "layers" for entry in path)
        return jnp.mean(leaf * leaf, axis=tuple(range(int(stacked), leaf.ndim)), keepdims=True)

    return jax.tree_util.tree_map_with_path(of_leaf, tree)


class Whole:
    """What rules ask of matrices, none of which is cut."""

    mean_squares = staticmethod(mean_squares)


def norm_of(tree: Any) -> float:
    return math.sqrt(
        sum(float((np.asarray(x, np.float64) ** 2).sum()) for x in jax.tree.leaves(tree))
    )


def rates(num_steps: int = NUM_STEPS) -> list[float]:
    """High enough that decay, the rate squared, shows; no two the same."""
    return [0.1 / math.sqrt(k) for k in range(1, num_steps + 1)]


def random_params(num_layers: int = 3) -> dict[str, Any]:
    """Layers that differ by factors of 100, and norm scales at zero as they begin."""
    rng = np.random.default_rng(0)
    sizes = 100.0 ** np.arange(-1, num_layers - 1)
    stacked = rng.normal(size=(num_layers, 4, 6)) * sizes[:, None, None]
    return {
        "embedding_VD": rng.normal(size=(7, 4)).astype(np.float32),
        "layers": {
            "norm_scale_D": np.zeros((num_layers, 4), np.float32),
            "w_gate_DF": stacked.astype(np.float32),
        },
    }


def random_gradients(params: Any, seed: int = 1, num_steps: int = NUM_STEPS) -> list[Any]:
    """Of very unequal size from step to step, so that clips act in some steps only."""
    rng = np.random.default_rng(seed)

    def one_step() -> Any:
        size = 10 ** rng.uniform(-2, 1)
        return jax.tree.map(
            lambda p: (rng.normal(size=p.shape) * size).astype(np.float32) / 8, params
        )

    return [one_step() for _ in range(num_steps)]


@functools.cache
def compiled(settings: config.Adafactor | config.AdamW) -> tuple[Any, Any]:
    """The rule's init, and (params, state, gradient, its norm, rate) -> (params, state)."""
    rule = optimizer.build(settings, Whole())

    def step(params, state, gradient, norm, rate):
        updates, state = rule.update(gradient, state, params, gradient_norm=norm, rate=rate)
        return optax.apply_updates(params, updates), state

    return jax.jit(rule.init), jax.jit(step)


def run(settings: Any, params: Any, gradients: list[Any], rates: list[float]) -> tuple[Any, Any]:
    """Parameters and optimizer state after all steps."""
    init, step = compiled(settings)
    state = init(params)
    for gradient, rate in zip(gradients, rates, strict=True):
        norm = np.float32(norm_of(gradient))
        params, state = step(params, state, gradient, norm, np.float32(rate))
    return jax.device_get((params, state))


# --- Adafactor ----------------------------------------------------------------------------


def matrices(tree: dict[str, Any]) -> dict[str, np.ndarray]:
    """Every matrix on its own in float64: each layer of a stacked leaf is one."""
    found = {"embedding_VD": np.asarray(tree["embedding_VD"], np.float64)}
    for name, leaf in tree["layers"].items():
        for number, matrix in enumerate(np.asarray(leaf, np.float64)):
            found[f"{name} {number}"] = matrix
    return found


def rms(x: np.ndarray) -> float:
    return math.sqrt((x**2).mean())


def numpy_adafactor(
    settings: config.Adafactor, params: Any, gradients: list[Any], rates: list[float]
) -> dict[str, np.ndarray]:
    """T5X's order of operations, matrix by matrix."""
    weights = matrices(params)
    v = {name: np.zeros_like(p) for name, p in weights.items()}
    m = {name: np.zeros_like(p) for name, p in weights.items()}
    for s, (gradient, rate) in enumerate(zip(gradients, rates, strict=True)):
        g = matrices(gradient)
        if settings.clip_norm is not None:
            norm = math.sqrt(sum((x**2).sum() for x in g.values()))
            g = {name: x * min(1, settings.clip_norm / norm) for name, x in g.items()}
        beta2 = 1 - (s + 1) ** -settings.beta2_exponent
        for name, p in weights.items():
            scale = max(rms(p), settings.epsilon_scale)
            squared = g[name] ** 2 + settings.epsilon_square
            v[name] = beta2 * v[name] + (1 - beta2) * squared
            y = g[name] / np.sqrt(v[name])
            if settings.update_clip is not None:
                y = y / max(1, rms(y) / settings.update_clip)
            u = rate * scale * y
            m[name] = settings.beta1 * m[name] + (1 - settings.beta1) * u
            exponent = settings.weight_decay_exponent
            decay = 0 if exponent is None else rate**exponent
            weights[name] = (1 - decay) * p - m[name]
    return weights


VARIANTS: dict[str, dict[str, Any]] = {
    "palm": {},
    "no update clip": {"update_clip": None},
    "no global clip": {"clip_norm": None},
    "no decay": {"weight_decay_exponent": None},
    "other numbers": {
        "beta1": 0.5,
        "beta2_exponent": 0.6,
        "clip_norm": 0.3,
        "update_clip": 0.7,
        "weight_decay_exponent": 1.5,
        "epsilon_scale": 0.2,
        "epsilon_square": 1e-3,
    },
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_adafactor_is_t5xs_order_of_operations_for_each_matrix(variant):
    rule, params = config.Adafactor(**VARIANTS[variant]), random_params()
    gradients = random_gradients(params)
    expected = numpy_adafactor(rule, params, gradients, rates())
    found = matrices(run(rule, params, gradients, rates())[0])
    assert found.keys() == expected.keys()
    for name in found:
        # Float32 through thirty steps; the facts about a matrix are relative to its size.
        near = 3e-6 * np.abs(expected[name]).max()
        np.testing.assert_allclose(found[name], expected[name], rtol=0, atol=near)


def test_every_variant_of_adafactor_ends_elsewhere():
    # Otherwise the test above could not tell whether a clip or the decay is there at all.
    params = random_params()
    gradients = random_gradients(params)
    ends = [
        numpy_adafactor(config.Adafactor(**changes), params, gradients, rates())
        for changes in VARIANTS.values()
    ]
    for other in ends[1:]:
        for name, end in ends[0].items():
            assert np.abs(other[name] - end).max() > 1e-3 * np.abs(end).max()


def test_adafactor_of_unstacked_matrices_is_that_of_optax():
    rng = np.random.default_rng(0)
    params = {
        name: rng.normal(size=shape).astype(np.float32) * size
        for name, shape, size in (("a", (5, 8), 1.0), ("b", (3, 4, 2), 30.0), ("c", (6,), 1e-5))
    }
    gradients = random_gradients(params)

    def rate(count):
        return 0.1 / jnp.sqrt(count + 1.0)

    theirs = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adafactor(
            learning_rate=rate,
            factored=False,
            decay_rate=0.8,
            momentum=0.9,
            clipping_threshold=1.0,
            weight_decay_rate=lambda count: rate(count) ** 2,
        ),
    )

    @jax.jit
    def step(params, state, gradient):
        updates, state = theirs.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    expected, state = params, theirs.init(params)
    for gradient in gradients:
        expected, state = step(expected, state, gradient)
    found, _ = run(ADAFACTOR, params, gradients, rates())
    for name in params:
        near = 3e-6 * np.abs(expected[name]).max()
        np.testing.assert_allclose(found[name], expected[name], rtol=0, atol=near)


def test_first_two_steps_of_adafactor_are_as_calculated_by_hand():
    params = {"w": np.full((2, 3), 0.5, np.float32)}
    gradients = [{"w": np.full((2, 3), 0.2, np.float32)}] * 2
    after_one, _ = run(ADAFACTOR, params, gradients[:1], [0.01])
    after_two, _ = run(ADAFACTOR, params, gradients, [0.01, 0.01])
    assert after_one["w"].ravel() == pytest.approx([0.49945] * 6, abs=1e-7)
    assert after_two["w"].ravel() == pytest.approx([0.4984506] * 6, abs=1e-7)


def test_a_zero_parameter_moves_by_the_floor_of_its_scale():
    params = {"norm_scale_D": np.zeros(3, np.float32)}
    gradients = [{"norm_scale_D": np.array([0.1, -0.2, 0.3], np.float32)}]
    after, _ = run(config.Adafactor(beta1=0.0), params, gradients, [0.01])
    assert after["norm_scale_D"] == pytest.approx([-1e-5, 1e-5, -1e-5], rel=1e-5)


def test_second_moment_forgets_by_beta2_of_the_update_counted_from_one():
    rng = np.random.default_rng(0)
    params = {"w": np.ones((2, 3), np.float32)}
    gradients = [{"w": rng.uniform(0.05, 0.2, (2, 3)).astype(np.float32)} for _ in range(10)]
    squares = [np.asarray(g["w"], np.float64) ** 2 for g in gradients]

    def found(num_steps):
        _, state = run(ADAFACTOR, params, gradients[:num_steps], [0.01] * num_steps)
        return np.asarray(optax.tree.get(state, "v")["w"])

    # beta2 is zero in the first update: nothing of the initial zero is left to correct.
    np.testing.assert_allclose(found(1), squares[0], rtol=1e-6)
    expected = 0.425651 * squares[0] + (1 - 0.425651) * squares[1]
    np.testing.assert_allclose(found(2), expected, rtol=2e-6)
    np.testing.assert_allclose(found(10), 0.841511 * found(9) + 0.158489 * squares[9], rtol=2e-6)


def test_stacked_layers_move_as_separate_layers_do():
    params = random_params()
    params["layers"]["norm_scale_D"] += np.array([[0.5], [1.0], [2.0]], np.float32)

    def apart(tree):
        layers = {
            f"layer {i}": {name: leaf[i] for name, leaf in tree["layers"].items()} for i in range(3)
        }
        return {"embedding_VD": tree["embedding_VD"], **layers}

    gradients = random_gradients(params, num_steps=3)
    rate = [0.05] * 3
    expected, _ = run(ADAFACTOR, apart(params), [apart(g) for g in gradients], rate)
    found = apart(run(ADAFACTOR, params, gradients, rate)[0])
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6 * np.abs(other).max())
    # The three layers' first moves are in the ratio of their own sizes, 100 to 1.
    after, _ = run(config.Adafactor(beta1=0.0), params, gradients[:1], [1e-3])
    moves = [
        rms(after["layers"]["w_gate_DF"][i] - params["layers"]["w_gate_DF"][i]) for i in (0, 1)
    ]
    sizes = [rms(params["layers"]["w_gate_DF"][i]) for i in (0, 1)]
    assert moves == pytest.approx([1e-3 * size for size in sizes], rel=2e-3)

    # Norm scales decay like any parameter, stacked or not.
    for tree in (params, apart(params)):
        decayed, _ = run(ADAFACTOR, tree, [jax.tree.map(np.zeros_like, tree)], [0.1])
        for before, after in zip(jax.tree.leaves(tree), jax.tree.leaves(decayed), strict=True):
            np.testing.assert_allclose(after, 0.99 * before, rtol=2e-7)


@pytest.mark.parametrize(
    ("changes", "factor"),
    [
        ({}, 1 - 0.2**2),
        ({"weight_decay_exponent": 1.0}, 1 - 0.2),
        ({"weight_decay_exponent": None}, 1.0),
    ],
)
def test_without_a_gradient_only_decay_moves_a_parameter(changes, factor):
    params = random_params()
    zeros = jax.tree.map(np.zeros_like, params)
    found, _ = run(config.Adafactor(**changes), params, [zeros] * 2, [0.2] * 2)
    for before, after in zip(jax.tree.leaves(params), jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(after, factor**2 * before, rtol=4e-7)


def test_a_row_without_gradient_only_decays_while_its_neighbours_move():
    params = random_params()
    gradients = random_gradients(params)
    for gradient in gradients:
        gradient["embedding_VD"][3] = 0.0
    found, _ = run(ADAFACTOR, params, gradients, rates())
    kept = math.prod(1 - rate**2 for rate in rates())
    moved = np.abs(found["embedding_VD"] - kept * params["embedding_VD"]).max(axis=1)
    assert moved[3] < 1e-6
    assert (np.delete(moved, 3) > 0.05).all()


# --- AdamW --------------------------------------------------------------------------------


def test_first_step_of_adamw_is_as_calculated_by_hand():
    rule = config.AdamW(name="adamw", weight_decay=0.1)
    after, _ = run(
        rule, {"w": np.ones(1, np.float32)}, [{"w": np.full(1, 0.5, np.float32)}], [1e-3]
    )
    assert float(after["w"][0] - 1) == pytest.approx(-0.0011, abs=6e-8)


@pytest.mark.parametrize("clip_norm", [1.0, 0.2, None])
def test_adamw_is_that_of_optax(clip_norm):
    rule = config.AdamW(
        name="adamw", beta1=0.8, beta2=0.95, epsilon=1e-4, weight_decay=0.3, clip_norm=clip_norm
    )
    params = random_params()
    gradients = random_gradients(params)
    theirs = optax.chain(
        optax.identity() if clip_norm is None else optax.clip_by_global_norm(clip_norm),
        optax.adamw(
            lambda count: 0.1 / jnp.sqrt(count + 1.0), b1=0.8, b2=0.95, eps=1e-4, weight_decay=0.3
        ),
    )

    @jax.jit
    def step(params, state, gradient):
        updates, state = theirs.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    expected, state = params, theirs.init(params)
    for gradient in gradients:
        expected, state = step(expected, state, gradient)
    found, _ = run(rule, params, gradients, rates())
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        # Float32 through thirty steps.
        np.testing.assert_allclose(one, other, rtol=3e-6, atol=3e-6 * np.abs(other).max())


def test_adamw_without_a_gradient_only_decays():
    params = random_params()
    zeros = jax.tree.map(np.zeros_like, params)
    found, _ = run(ADAMW, params, [zeros], [0.2])
    for before, after in zip(jax.tree.leaves(params), jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(after, (1 - 0.2 * 0.1) * before, rtol=2e-7)


# --- both ---------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", [ADAFACTOR, ADAMW], ids=lambda rule: rule.name)
def test_counters_count_updates(rule):
    params = random_params()
    _, state = run(rule, params, random_gradients(params, num_steps=3), [0.01] * 3)
    counters = [x for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.integer)]
    assert counters
    assert [int(counter) for counter in counters] == [3] * len(counters)


@pytest.mark.parametrize("rule", [ADAFACTOR, ADAMW], ids=lambda rule: rule.name)
def test_moments_are_float32_in_the_shapes_of_the_parameters(rule):
    params = random_params()
    state = optimizer.build(rule, Whole()).init(params)
    moments = [x for x in jax.tree.leaves(state) if x.size > 1]
    # Two a parameter: nothing is factored.
    expected = sorted(2 * [p.shape for p in jax.tree.leaves(params)])
    assert sorted(m.shape for m in moments) == expected
    assert {m.dtype for m in moments} == {np.dtype(np.float32)}


def test_parts_switched_off_leave_the_form_of_the_state_alone():
    params = random_params()
    forms = {
        jax.tree.structure(compiled(config.Adafactor(**changes))[0](params))
        for changes in VARIANTS.values()
    }
    assert len(forms) == 1


def test_numbers_in_force_are_those_the_update_uses():
    rule = config.Adafactor(beta1=0.7, weight_decay_exponent=1.5)
    params = random_params()
    gradients = random_gradients(params, num_steps=10)
    for k, beta2 in ((1, 0.0), (2, 0.425651), (10, 0.841511)):
        _, state = run(rule, params, gradients[: k - 1], [0.01] * (k - 1))
        numbers = optimizer.in_force(rule, state, jnp.float32(0.04))
        expected = {"beta1": 0.7, "beta2": beta2, "clip_norm": 1.0, "weight_decay": 0.008}
        assert {name: float(value) for name, value in numbers.items()} == pytest.approx(
            expected, rel=1e-5
        )
        assert {(value.dtype, value.shape) for value in numbers.values()} == {
            (np.dtype(np.float32), ())
        }


def test_numbers_in_force_of_parts_switched_off_and_of_adamw():
    off = config.Adafactor(clip_norm=None, weight_decay_exponent=None)
    state = compiled(off)[0](random_params())
    numbers = optimizer.in_force(off, state, jnp.float32(0.04))
    assert float(numbers["clip_norm"]) == np.inf
    assert float(numbers["weight_decay"]) == 0
    adamw = config.AdamW(name="adamw", beta2=0.97, weight_decay=0.5, clip_norm=0.3)
    state = compiled(adamw)[0](random_params())
    numbers = optimizer.in_force(adamw, state, jnp.float32(0.04))
    expected = {"beta1": 0.9, "beta2": 0.97, "clip_norm": 0.3, "weight_decay": 0.02}
    assert {name: float(x) for name, x in numbers.items()} == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("name", ["adafactor", "adamw"])
def test_without_a_global_clip_the_gradient_norm_is_not_used(name):
    kind = {"adafactor": config.Adafactor, "adamw": config.AdamW}[name]
    init, step = compiled(kind(name=name, clip_norm=None))
    params = random_params()
    gradient = random_gradients(params, num_steps=1)[0]
    after = [
        step(params, init(params), gradient, np.float32(norm), np.float32(0.1))
        for norm in (1, np.nan)
    ]
    for one, other in zip(*map(jax.tree.leaves, after), strict=True):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


@given(seed=st.integers(0, 2**32 - 1), size=st.floats(1e-6, 1e6), limit=st.floats(1e-3, 1e3))
@settings(max_examples=30)
def test_clipping_shortens_long_gradients_and_leaves_short_ones_as_they_are(seed, size, limit):
    rng = np.random.default_rng(seed)
    gradient = {name: (rng.normal(size=5) * size).astype(np.float32) for name in "ab"}
    norm = norm_of(gradient)
    clip = parts.clip_by_norm(limit)
    clipped, _ = clip.update(gradient, optax.EmptyState(), gradient_norm=np.float32(norm))
    assert norm_of(clipped) <= limit * (1 + 1e-6)
    if norm < limit * (1 - 1e-6):
        for name in "ab":
            assert np.asarray(clipped[name]).tobytes() == gradient[name].tobytes()
    else:
        for name in "ab":
            expected = gradient[name].astype(np.float64) * (limit / norm)
            np.testing.assert_allclose(clipped[name], expected, rtol=1e-6)


def test_a_gradient_of_zero_is_not_divided_by_its_norm():
    clip = parts.clip_by_norm(1.0)
    zero = {"w": jnp.zeros(3)}
    clipped, _ = clip.update(zero, clip.init(zero), gradient_norm=jnp.float32(0))
    assert clipped["w"].tolist() == [0, 0, 0]


def test_update_clip_and_parameter_scale_use_each_layers_own_rms():
    tree = {
        "layers": {"w": jnp.array([[3.0, 4.0, 0.0, 0.0], [0.3, 0.4, 0.0, 0.0], [30, 40, 0, 0]])}
    }
    clip = adafactor.clip_by_matrix_rms(1.0, Whole())  # their RMS: 2.5, 0.25 and 25
    clipped, _ = clip.update(tree, clip.init(tree), tree)
    expected = [[1.2, 1.6, 0, 0], [0.3, 0.4, 0, 0], [1.2, 1.6, 0, 0]]
    np.testing.assert_allclose(clipped["layers"]["w"], expected, rtol=1e-6)
    scale = adafactor.scale_by_matrix_rms(1.0, Whole())
    ones = jax.tree.map(jnp.ones_like, tree)
    scaled, _ = scale.update(ones, scale.init(tree), tree)
    np.testing.assert_allclose(scaled["layers"]["w"], [[2.5] * 4, [1] * 4, [25] * 4], rtol=1e-6)


@pytest.mark.parametrize("rule", [ADAFACTOR, ADAMW], ids=lambda rule: rule.name)
def test_no_array_is_divided_by_a_number_that_xla_could_invert(rule):
    # It would for some device counts and not for others, which changes bits.
    params = random_params()
    build = optimizer.build(rule, Whole())
    state = build.init(params)
    one = jnp.float32(1)
    program = jax.make_jaxpr(
        lambda g, s, p, norm, rate: build.update(g, s, p, gradient_norm=norm, rate=rate)
    )(params, state, params, one, one)
    broadcasts = {
        e.outvars[0] for e in program.jaxpr.eqns if e.primitive.name == "broadcast_in_dim"
    }
    for e in program.jaxpr.eqns:
        if e.primitive.name == "div" and e.invars[0].aval.size > 3:  # a number a layer at most
            assert e.invars[1].aval.shape == e.invars[0].aval.shape
            assert e.invars[1] not in broadcasts


@pytest.mark.parametrize("weight_decay", [0.0, 0.5])
def test_updates_too_small_for_bfloat16_reach_float32_weights(weight_decay):
    rule = optimizer.build(
        config.AdamW(name="adamw", weight_decay=weight_decay, clip_norm=None), Whole()
    )

    def gradient(weight):
        # Compute in bfloat16, as the model does with a master weight.
        return jax.grad(lambda w: w.astype(jnp.bfloat16).astype(jnp.float32) * 3)(weight)

    @jax.jit
    def step(weight, low, state):
        update, state = rule.update(
            gradient(weight), state, weight, gradient_norm=jnp.float32(3), rate=jnp.float32(1e-3)
        )
        return optax.apply_updates(weight, update), low + update.astype(jnp.bfloat16), state

    weight, low = jnp.float32(1), jnp.bfloat16(1)
    state = rule.init(weight)
    for _ in range(100):
        weight, low, state = step(weight, low, state)
    # Constant gradients make AdamW move by the rate: 100 x 1e-3, and decay on top.
    expected = 1.0
    for _ in range(100):
        expected = expected * (1 - 1e-3 * weight_decay) - 1e-3
    assert weight.dtype == jnp.float32
    assert float(weight) == pytest.approx(expected, abs=1e-5)
    assert float(low) == 1.0
