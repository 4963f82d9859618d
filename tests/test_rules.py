"""Factored Adafactor, Lion, Muon, SGD, Sophia, decay's variants, step by step in float64."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

from palm_jax import config, optimizer, reductions, sharding
from palm_jax.optimizer import kinds, muon, soap

NUM_STEPS = 6
NUM_LAYERS = 3
# (rows, columns) of kernels as matrices: inputs by outputs.
SHAPES = {
    "w_query_DHK": (4, 2, 3),
    "w_attention_HKD": (2, 3, 4),
    "w_gate_DF": (4, 10),
    "w_down_FD": (10, 4),
    "w_key_DK": (4, 3),
}


def params_of(seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return rng.normal(size=shape).astype(np.float32)

    layers = {name: normal(NUM_LAYERS, *shape) for name, shape in SHAPES.items()}
    # Layers of unequal size show whether sums keep them apart.
    layers = {
        k: x * 10.0 ** -np.arange(3.0)[(...,) + (None,) * (x.ndim - 1)] for k, x in layers.items()
    }
    layers["norm_scale_D"] = normal(NUM_LAYERS, 4) * 0.1
    return jax.tree.map(np.float32, {"embedding_VD": normal(7, 4), "layers": layers})


def gradients_of(params: Any) -> list[Any]:
    rng = np.random.default_rng(1)
    return [
        jax.tree.map(lambda p: (rng.normal(size=p.shape) / 8).astype(np.float32), params)
        for _ in range(NUM_STEPS)
    ]


RATES = [0.1 / math.sqrt(k) for k in range(1, NUM_STEPS + 1)]
SHARES = [1 / math.sqrt(k) for k in range(1, NUM_STEPS + 1)]


@functools.cache
def stepping(settings: config.Optimizer) -> tuple[Any, Any]:
    """The rule's init and step on one device, with the sums that the trainer hands it."""
    mesh = sharding.make_mesh(config.Mesh())
    rule = optimizer.build(settings, reductions.MatrixReductions(reductions.Canonical(2), 0))

    def step(params, state, gradient, norm, rate, share, curvature):
        updates, after = rule.update(
            gradient,
            state,
            params,
            gradient_norm=norm,
            rate=rate,
            share=share,
            curvature=curvature,
        )
        return optax.apply_updates(params, updates), after

    everywhere = PartitionSpec()
    mapped = jax.shard_map(
        step, mesh=mesh, in_specs=everywhere, out_specs=everywhere, check_vma=False
    )
    return jax.jit(rule.init), jax.jit(mapped)


def norm_of(tree: Any) -> float:
    return math.sqrt(sum(float((np.float64(x) ** 2).sum()) for x in jax.tree.leaves(tree)))


def run(
    settings: config.Optimizer,
    params: Any,
    gradients: list[Any],
    estimates: list[Any] | None = None,
) -> tuple[Any, Any]:
    """`estimates`: of curvature, for Sophia; by default the gradients themselves."""
    init, step = stepping(settings)
    state = init(params)
    for index, gradient in enumerate(gradients):
        numbers = map(np.float32, (norm_of(gradient), RATES[index], SHARES[index]))
        estimate = gradient if estimates is None else estimates[index]
        params, state = step(params, state, gradient, *numbers, estimate)
    return jax.device_get((params, state))


def apart(tree: Any) -> dict[str, np.ndarray]:
    """Every matrix and vector by itself in float64: "w_gate_DF 1" is that of layer 1."""
    found = {name: np.float64(x) for name, x in tree.items() if name != "layers"}
    for name, stacked in tree["layers"].items():
        found |= {f"{name} {n}": np.float64(x) for n, x in enumerate(stacked)}
    return found


def as_matrix(name: str, x: np.ndarray) -> np.ndarray:
    """[I, O], the letters of the axes giving the inputs first."""
    axes = name.split(" ")[0].rpartition("_")[2]
    return (
        x.reshape(x.shape[0] if axes[0] == "D" else -1, x.shape[-1] if axes[-1] == "D" else -1)
        if x.ndim > 1
        else x
    )


def close(found: Any, expected: dict[str, np.ndarray], tolerance: float) -> None:
    mine = apart(found)
    assert mine.keys() == expected.keys()
    for name, x in mine.items():
        np.testing.assert_allclose(
            x, expected[name], rtol=0, atol=tolerance * np.abs(expected[name]).max(), err_msg=name
        )


def followed(params: Any, gradients: list[Any], step: Any) -> dict[str, np.ndarray]:
    """`step(name, memory, p, g, index)` of every array by itself; `memory` is a dict of its own."""
    weights = apart(params)
    memories: dict[str, dict[str, Any]] = {name: {} for name in weights}
    for index, gradient in enumerate(gradients):
        norm = norm_of(gradient)
        for name, g in apart(gradient).items():
            clipped = g * min(1.0, 1.0 / norm)
            weights[name] = step(name, memories[name], weights[name], clipped, index)
    return weights


def adamw(s: Any, memory: dict[str, Any], g: np.ndarray, index: int) -> np.ndarray:
    m = memory["m"] = s.beta1 * memory.get("m", 0) + (1 - s.beta1) * g
    v = memory["v"] = s.beta2 * memory.get("v", 0) + (1 - s.beta2) * g * g
    k = index + 1
    return (m / (1 - s.beta1**k)) / (np.sqrt(v / (1 - s.beta2**k)) + s.epsilon)


# Float32 through six steps.
NEAR = 3e-6


# --- Adafactor, factored ---


@pytest.mark.parametrize("update_clip", [1.0, None])
def test_factored_adafactor_follows_rows_and_columns_of_each_matrix(update_clip):
    settings = config.Adafactor(factored=True, update_clip=update_clip)

    def rms(x):
        return math.sqrt((x**2).mean())

    def step(name, memory, p, g, index):
        beta2 = 1 - (index + 1) ** -0.8
        square = g**2 + 1e-30
        if g.ndim > 1:
            axes = name.split(" ")[0].rpartition("_")[2]
            # D on one side, all else on the other.
            along = np.moveaxis(square, axes.index("D"), 0).reshape(
                square.shape[axes.index("D")], -1
            )
            R = memory["r"] = beta2 * memory.get("r", 0) + (1 - beta2) * along.sum(axis=1)
            C = memory["c"] = beta2 * memory.get("c", 0) + (1 - beta2) * along.sum(axis=0)
            v = np.outer(R, C) / R.sum()  # algorithm 4, line 7
            moved = np.moveaxis(square, axes.index("D"), 0).shape
            v = np.moveaxis(v.reshape(moved), 0, axes.index("D"))
        else:
            v = memory["v"] = beta2 * memory.get("v", 0) + (1 - beta2) * square
        y = g / np.sqrt(v)
        if update_clip is not None:
            y = y / max(1, rms(y) / update_clip)
        m = memory["m"] = 0.9 * memory.get("m", 0) + 0.1 * RATES[index] * max(rms(p), 1e-3) * y
        return (1 - RATES[index] ** 2) * p - m

    params = params_of()
    gradients = gradients_of(params)
    found, state = run(settings, params, gradients)
    close(found, followed(params, gradients, step), NEAR)
    moment = state["second_moment"]
    assert moment.rows["layers"]["w_query_D"].shape == (NUM_LAYERS, 4)
    assert moment.columns["layers"]["w_query_HK"].shape == (NUM_LAYERS, 2, 3)
    assert moment.columns["embedding_V"].shape == (7,)
    assert jax.tree.map(np.shape, moment.v) == {"layers": {"norm_scale_D": (NUM_LAYERS, 4)}}


def test_factoring_is_exact_where_squares_are_an_outer_product():
    params = params_of()
    rng = np.random.default_rng(3)
    gradient = gradients_of(params)[0]
    outer = np.abs(rng.normal(size=(NUM_LAYERS, 4, 1)) * rng.normal(size=(NUM_LAYERS, 1, 10)))
    gradient["layers"]["w_gate_DF"] = np.float32(outer * 0.1)
    after = [
        run(config.Adafactor(factored=factored), params, [gradient])[0]["layers"]["w_gate_DF"]
        for factored in (True, False)
    ]
    np.testing.assert_allclose(*after, rtol=1e-5)


# --- Lion and SGD ---


def test_lion_moves_by_signs_and_keeps_another_average():
    settings = config.Lion(name="lion", weight_decay=0.3)

    def step(name, memory, p, g, index):
        m = memory.get("m", np.zeros_like(g))
        memory["m"] = 0.99 * m + 0.01 * g
        return p - RATES[index] * (np.sign(0.9 * m + 0.1 * g) + 0.3 * p)

    params = params_of()
    gradients = gradients_of(params)
    found, _ = run(settings, params, gradients)
    close(found, followed(params, gradients, step), NEAR)


@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd_accumulates_gradients_and_keeps_decay_out_of_them(nesterov):
    settings = config.SGD(name="sgd", weight_decay=0.3, nesterov=nesterov)

    def step(name, memory, p, g, index):
        t = memory["t"] = 0.9 * memory.get("t", 0) + g
        return p - RATES[index] * ((0.9 * t + g if nesterov else t) + 0.3 * p)

    params = params_of()
    gradients = gradients_of(params)
    found, _ = run(settings, params, gradients)
    close(found, followed(params, gradients, step), NEAR)


# --- Muon ---


def newton_schulz(x: np.ndarray, steps: int = 5) -> np.ndarray:
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    x = x / (np.linalg.norm(x) + 1e-7)
    for _ in range(steps):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.T if tall else x


@pytest.mark.parametrize("changes", [{}, {"nesterov": False}, {"consistent_rms": 0.2}], ids=str)
def test_muon_orthogonalises_each_layers_kernels_and_leaves_all_else_to_adamw(changes):
    settings = config.Muon(name="muon", weight_decay=0.3, adamw_rate=0.5, **changes)

    def step(name, memory, p, g, index):
        if not name.startswith("w_"):
            return p - RATES[index] * (0.5 * adamw(settings, memory, g, index) + 0.3 * p)
        m = memory["m"] = 0.95 * memory.get("m", 0) + 0.05 * g
        u = 0.95 * m + 0.05 * g if settings.nesterov else m
        x = newton_schulz(as_matrix(name, u))
        rows, columns = x.shape
        if settings.consistent_rms is None:
            x = x * math.sqrt(max(1, columns / rows))
        else:
            x = x * 0.2 * math.sqrt(max(rows, columns))
        return p - RATES[index] * (x.reshape(p.shape) + 0.3 * p)

    params = params_of()
    gradients = gradients_of(params)
    found, state = run(settings, params, gradients)
    # A small singular value is multiplied by 3.4 in each of five iterations, and so are roundings.
    close(found, followed(params, gradients, step), 1e-5)
    moments = state["moments"]
    assert sorted(moments.ema) == ["layers"]
    assert sorted(moments.ema["layers"]) == sorted(SHAPES)
    assert sorted(moments.nu) == ["embedding_VD", "layers"]
    assert sorted(moments.nu["layers"]) == ["norm_scale_D"]


def test_newton_schulz_brings_singular_values_near_one():
    singular = np.diag(np.float32([1, 0.5, 0.1, 0.01]))
    # The norm of a matrix is divided out before: undone, to begin at the values themselves.
    begun = singular / np.linalg.norm(singular)
    x = np.diag(singular).astype(np.float64)
    for _ in range(5):
        x = 3.4445 * x - 4.7750 * x**3 + 2.0315 * x**5
    np.testing.assert_allclose(x, [0.69644, 0.76544, 0.71212, 0.69892], atol=1e-5)
    found = np.diag(np.asarray(muon.orthogonalised(jnp.asarray(begun), 5, 0)))
    expected = np.diag(newton_schulz(np.float64(begun)))
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert (np.abs(found) > 0.6).all()
    assert (np.abs(found) < 1.2).all()


def test_a_kernel_without_gradient_is_left_where_it_is_by_muon():
    params = params_of()
    zero = jax.tree.map(np.zeros_like, params)
    found, _ = run(config.Muon(name="muon"), params, [zero])
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(params), strict=True):
        np.testing.assert_array_equal(one, other)


# --- SOAP ---


def basis_of(state: Any, side: str, name: str) -> np.ndarray | None:
    """Of "w_gate_DF 1" in float64; None: the identity."""
    leaf, layer = name.split(" ")
    squares = getattr(state["moments"], f"{side}_basis")["layers"]
    rows = squares.get(f"{leaf.rpartition('_')[0]}_E")
    if rows is None:
        return None
    size = math.isqrt(rows.shape[1])
    return np.float64(rows[int(layer)]).reshape(size, size)


def turned(x: np.ndarray, left: np.ndarray | None, right: np.ndarray | None) -> np.ndarray:
    x = x if left is None else left.T @ x
    return x if right is None else x @ right


@pytest.mark.parametrize(
    "changes", [{}, {"largest_side": 5, "shampoo_beta": 0.8}, {"largest_side": 2}], ids=str
)
def test_soap_is_adam_in_each_layers_eigenbasis_and_adamw_for_all_else(changes):
    settings = config.SOAP(name="soap", weight_decay=0.3, refresh_every=2, **changes)
    beta = changes.get("shampoo_beta", 0.95)
    params = params_of()
    gradients = gradients_of(params)
    # Of a gradient with fewer rows than columns, some eigenvectors are any that are orthogonal.
    _, first = run(settings, params, gradients[:1])

    def step(name, memory, p, g, index):
        if not name.startswith("w_"):
            if index == 0:
                return p
            return p - RATES[index] * (adamw(settings, memory, g, index - 1) + 0.3 * p)
        g = as_matrix(name, g)
        products = {"left": g @ g.T, "right": g.T @ g}
        if index == 0:
            for side, product in products.items():
                memory[side], q = (1 - beta) * product, basis_of(first, side, name)
                memory["q", side] = q
                assert (q is None) == (len(product) > settings.largest_side)
                if q is not None:
                    np.testing.assert_allclose(q.T @ q, np.eye(len(q)), atol=1e-6)
                    eigenvalues = np.linalg.eigvalsh(memory[side])[::-1]
                    atol = 1e-6 * eigenvalues[0]
                    found = q.T @ memory[side] @ q
                    np.testing.assert_allclose(found, np.diag(eigenvalues), atol=atol)
            return p
        bases = memory["q", "left"], memory["q", "right"]
        m = memory["m"] = 0.95 * memory.get("m", 0) + 0.05 * g
        v = memory["v"] = 0.95 * memory.get("v", 0) + 0.05 * turned(g, *bases) ** 2
        u = turned(m, *bases) / (np.sqrt(v) + 1e-8)
        u = turned(u, *(None if q is None else q.T for q in bases))
        u = u * math.sqrt(1 - 0.95**index) / (1 - 0.95**index)
        for axis, (side, product) in enumerate(products.items()):
            square = memory[side] = beta * memory[side] + (1 - beta) * product
            q = memory["q", side]
            if q is not None and index % 2 == 0:
                order = np.argsort(-np.diag(q.T @ square @ q))
                memory["q", side] = np.linalg.qr(square @ q[:, order])[0]
                memory["v"] = memory["v"].take(order, axis)
        return p - RATES[index] * (u.reshape(p.shape) + 0.3 * p)

    found, state = run(settings, params, gradients)
    # Each decomposition multiplies roundings by the ratio of a square's eigenvalues.
    close(found, followed(params, gradients, step), 3e-5)
    moments = state["moments"]
    assert sorted(moments.eigen_nu["layers"]) == sorted(SHAPES)
    assert sorted(moments.nu["layers"]) == ["norm_scale_D"]
    assert sorted(moments.mu["layers"]) == sorted([*SHAPES, "norm_scale_D"])


def test_soap_s_first_update_only_makes_the_eigenbases():
    settings = config.SOAP(name="soap", weight_decay=0.3, refresh_every=2)
    params = params_of()
    found, state = run(settings, params, gradients_of(params)[:1])
    jax.tree.map(np.testing.assert_array_equal, found, params)
    moments = state["moments"]
    assert not any(x.any() for x in jax.tree.leaves([moments.mu, moments.nu, moments.eigen_nu]))
    rate = jnp.float32(0.5)
    before = jax.device_get(stepping(settings)[0](params))
    assert optimizer.in_force(settings, before, rate)["weight_decay"] == 0
    assert optimizer.in_force(settings, state, rate)["weight_decay"] == pytest.approx(0.15)


def test_a_refreshed_eigenbasis_comes_nearer_to_the_eigenvectors():
    rng = np.random.default_rng(0)
    exact = np.linalg.qr(rng.normal(size=(6, 6)))[0]
    square = np.float32(exact * [64, 32, 16, 8, 4, 2] @ exact.T)
    # Near them, in another order.
    start = np.linalg.qr(exact[:, [3, 0, 1, 5, 4, 2]] + 0.02 * rng.normal(size=(6, 6)))[0]
    basis, order = soap.refreshed(jnp.asarray(square), jnp.float32(start), 0)
    assert list(order) == [1, 2, 5, 0, 4, 3]

    def away(q):
        return np.abs(np.abs(exact.T @ np.float64(q)) - np.eye(6)).max()

    assert away(basis) < 0.7 * away(start[:, order])
    np.testing.assert_allclose(basis.T @ basis, np.eye(6), atol=1e-6)


def test_what_soap_takes_of_the_moments_is_shown_in_the_eigenbasis():
    settings = config.SOAP(name="soap")
    params = params_of()
    first, second = gradients_of(params)[:2]
    _, after = run(settings, params, [first, second])
    matrices = reductions.MatrixReductions(reductions.Canonical(2), 0)
    shown = jax.shard_map(
        lambda after: soap.normalised(settings, after, matrices, 0),
        mesh=sharding.make_mesh(config.Mesh()),
        in_specs=PartitionSpec(),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    found = jax.jit(shown)(after)
    assert jax.tree.structure(found) == jax.tree.structure(params)
    for name, g in apart(second).items():
        if name.startswith("w_"):
            bases = (basis_of(after, side, name) for side in ("left", "right"))
            g = turned(as_matrix(name, g), *bases).reshape(g.shape)
        # Of a first step of Adam's the sign is left.
        np.testing.assert_allclose(apart(found)[name], np.sign(g), rtol=2e-3, err_msg=name)


def test_decompositions_of_what_is_not_finite_come_to_an_end():
    unknown = jnp.full((5, 5), jnp.nan)
    assert np.isnan(soap.eigenbasis(unknown)).all()
    basis, order = soap.refreshed(unknown, jnp.eye(5), 0)
    assert np.isnan(basis).any()
    assert sorted(order) == list(range(5))


# --- Sophia ---


def test_sophia_divides_by_curvature_that_every_kth_update_averages_and_clips_each_element():
    settings = config.Sophia(
        name="sophia", refresh_every=2, gamma=0.5, epsilon=1e-4, weight_decay=0.3
    )
    params = params_of()
    gradients = gradients_of(params)
    rng = np.random.default_rng(5)
    # Hutchinson's may be negative.
    estimates = [
        jax.tree.map(lambda p: (rng.normal(size=p.shape) + 0.5).astype(np.float32), params)
        for _ in gradients
    ]
    clipped = []

    def step(name, memory, p, g, index):
        m = memory["m"] = 0.965 * memory.get("m", 0) + 0.035 * g
        if index in (0, 2, 4):
            estimate = apart(estimates[index])[name]
            memory["h"] = 0.99 * memory.get("h", 0) + 0.01 * estimate
        u = m / np.maximum(0.5 * memory["h"], 1e-4)
        clipped.append(np.abs(u).ravel() > 1)
        return (1 - RATES[index] * 0.3) * p - RATES[index] * np.clip(u, -1, 1)

    found, state = run(settings, params, gradients, estimates)
    # A momentum that nearly cancels is divided by as little as epsilon.
    close(found, followed(params, gradients, step), 1e-5)
    assert 0.1 < np.concatenate(clipped).mean() < 0.9
    assert jax.tree.structure(state["moments"].curvature) == jax.tree.structure(params)


def test_sophia_keeps_its_curvature_where_an_estimate_is_not_finite():
    params = params_of()
    gradients = gradients_of(params)[:1]
    estimate = jax.tree.map(np.ones_like, params)
    estimate["embedding_VD"][0, 0] = np.nan
    estimate["embedding_VD"][0, 1] = np.inf
    _, state = run(config.Sophia(name="sophia"), params, gradients, [estimate])
    h = state["moments"].curvature["embedding_VD"]
    np.testing.assert_array_equal(h[0, :2], 0)
    np.testing.assert_allclose(h[0, 2:], 0.01, rtol=1e-6)


# --- decay ---


def test_independent_decay_follows_the_share_of_the_peak_and_not_the_rate():
    settings = config.AdamW(name="adamw", weight_decay=0.3, independent_decay=True)

    def step(name, memory, p, g, index):
        return p - RATES[index] * adamw(settings, memory, g, index) - SHARES[index] * 0.3 * p

    params = params_of()
    gradients = gradients_of(params)
    found, _ = run(settings, params, gradients)
    close(found, followed(params, gradients, step), NEAR)
    assert optimizer.needs_share(settings)
    assert not optimizer.needs_share(config.AdamW(name="adamw"))


RULES: dict[str, Any] = {
    "adafactor": config.Adafactor,
    "adamw": config.AdamW,
    "lion": config.Lion,
    "muon": config.Muon,
    "soap": config.SOAP,
    "sgd": config.SGD,
    "sophia": config.Sophia,
}


@pytest.mark.parametrize("name", RULES)
def test_parameters_that_do_not_decay_are_told_by_kind(name):
    changes = {} if name == "adafactor" else {"weight_decay": 0.1}
    settings = RULES[name](name=name, no_decay=("norms", "embeddings"), **changes)
    params = params_of()
    zero = jax.tree.map(np.zeros_like, params)
    found, _ = run(settings, params, [zero, zero])  # SOAP's first has no decay
    for leaf, before in apart(params).items():
        moved = apart(found)[leaf] != before
        assert moved.all() if leaf.startswith("w_") else not moved.any()


def test_kinds_of_parameters():
    names = {
        "embedding_VD": "embeddings",
        "unembedding_VD": "embeddings",
        "norm_scale_D": "norms",
        "query_norm_scale_K": "norms",
        "up_bias_F": "biases",
        "query_bias_HK": "biases",
        "w_query_DHK": "kernels",
    }
    for name, kind in names.items():
        assert kinds.kind((jax.tree_util.DictKey(name),)) == kind


# --- all ---


@pytest.mark.parametrize("name", RULES)
def test_updates_are_counted(name):
    params = params_of()
    _, state = run(RULES[name](name=name), params, gradients_of(params)[:3])
    counters = [x for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.integer)]
    assert [int(x) for x in counters] == [3]


@pytest.mark.parametrize("name", ["lion", "muon", "sgd", "sophia"])
def test_numbers_in_force_are_those_of_the_settings(name):
    settings = RULES[name](name=name, weight_decay=0.5, clip_norm=None)
    found = optimizer.in_force(settings, None, jnp.float32(0.04))
    assert {str(x.dtype) for x in found.values()} == {"float32"}
    numbers = {key: float(x) for key, x in found.items()}
    assert numbers.pop("weight_decay") == pytest.approx(0.02)
    assert numbers.pop("clip_norm") == np.inf
    own = {key: value for key, value in settings if key in ("beta1", "beta2", "momentum")}
    assert numbers == pytest.approx(own)


@pytest.mark.parametrize(
    "settings",
    [
        config.Lion(name="lion"),
        config.Muon(name="muon"),
        config.SGD(name="sgd"),
        config.SGD(name="sgd", nesterov=True),
        config.Sophia(name="sophia"),
    ],
    ids=str,
)
def test_what_is_taken_of_the_moments_is_shown_before_signs_and_orthogonalisation(settings):
    params = params_of()
    first, second = gradients_of(params)[:2]
    _, before = run(settings, params, [first])
    _, after = run(settings, params, [first, second])
    clip = jnp.float32(min(1, 1 / norm_of(second)))
    g = np.float64(second["layers"]["w_gate_DF"]) * float(clip)
    unused: Any = None
    found = optimizer.normalised(settings, second, before, after, clip, unused, 0)
    if settings.name == "lion":
        expected = 0.9 * before["moments"].ema["layers"]["w_gate_DF"] + 0.1 * g
    elif settings.name == "muon":
        expected = 0.95 * after["moments"].ema["layers"]["w_gate_DF"] + 0.05 * g
    elif settings.name == "sophia":
        expected = after["moments"].ema["layers"]["w_gate_DF"]
    else:
        expected = after["moments"].trace["layers"]["w_gate_DF"]
        expected = 0.9 * expected + g if settings.nesterov else expected
    np.testing.assert_allclose(found["layers"]["w_gate_DF"], expected, rtol=1e-5, atol=1e-7)
    assert jax.tree.structure(found) == jax.tree.structure(params)
