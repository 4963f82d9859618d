"""The loss against hand calculations, NumPy float64, optax and finite differences.

Letters as in model.py.
"""

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

from palm_jax import loss, model, sharding, step
from palm_jax.decoder import split

Z_WEIGHT = 1e-4


def total(sums_B: loss.LossSums) -> loss.LossSums:
    return jax.tree.map(jnp.sum, sums_B)


def objective(
    logits_BLV: Any, targets_BL: Any, weights_BL: Any = None, z_weight: float = Z_WEIGHT
) -> jax.Array:
    sums_B = loss.sums_by_sequence(logits_BLV, targets_BL, weights_BL)
    return loss.objective(total(sums_B), z_weight)


gradient_of = jax.jit(jax.grad(objective))
sums_of = jax.jit(loss.sums_by_sequence)
optax_losses = jax.jit(optax.losses.softmax_cross_entropy_with_integer_labels)
optax_gradient_of = jax.jit(jax.grad(lambda *inputs: optax_losses(*inputs).sum()))


def numpy_sums(logits_BLV, targets_BL, weights_BL) -> dict[str, list[float]]:
    """The sums of each sequence, one token at a time, in float64."""
    sums: dict[str, list[float]] = {"cross_entropy": [], "z": [], "log_z": [], "targets": []}
    for scores_LV, targets_L, weights_L in zip(logits_BLV, targets_BL, weights_BL, strict=True):
        row = dict.fromkeys(sums, 0.0)
        for scores, target, counted in zip(scores_LV, targets_L, weights_L, strict=True):
            if not counted:
                continue
            peak = max(float(s) for s in scores)
            log_z = peak + math.log(sum(math.exp(float(s) - peak) for s in scores))
            row["cross_entropy"] += log_z - float(scores[target])
            row["z"] += log_z**2
            row["log_z"] += log_z
            row["targets"] += 1
        for name, value in row.items():
            sums[name].append(value)
    return sums


def batch(seed: int, spread: float = 3.0, shift: float = 0.0) -> tuple[Any, Any, Any]:
    """Logits f32[3, 4, 7], targets and weights."""
    rng = np.random.default_rng(seed)
    logits_BLV = (rng.normal(size=(3, 4, 7)) * spread + shift).astype(np.float32)
    return logits_BLV, rng.integers(0, 7, (3, 4)), rng.random((3, 4)) < 0.6


# --- values -------------------------------------------------------------------------------


def test_loss_and_gradient_of_three_words_are_as_calculated_by_hand():
    logits_BLV, targets_BL = jnp.array([[[1.0, 2.0, 3.0]]]), jnp.array([[2]])
    value, gradient = jax.jit(jax.value_and_grad(objective))(logits_BLV, targets_BL)
    assert float(value) == pytest.approx(0.408767, abs=1e-6)
    assert gradient[0, 0] == pytest.approx([0.090092, 0.244895, -0.334306], abs=1e-6)


def test_masked_targets_and_padding_words_leave_perplexity_and_z_loss_alone():
    # Eight words in a table of 128 rows, every score zero; half the targets do not count.
    table_VD, hidden_BLD = jnp.ones((128, 4)), jnp.zeros((2, 6, 4))
    logits_BLV = loss.logits(hidden_BLD, table_VD, vocabulary_size=8)
    weights_BL = jnp.arange(6) % 2 == jnp.array([[0], [1]])
    sums = total(sums_of(logits_BLV, jnp.full((2, 6), 3), weights_BL))
    assert int(sums.targets) == 6
    cross_entropy = float(sums.cross_entropy) / 6
    assert cross_entropy == pytest.approx(2.079442, abs=5e-7)
    assert math.exp(cross_entropy) == pytest.approx(8.0, abs=1e-5)
    assert float(Z_WEIGHT * sums.z) / 6 == pytest.approx(4.3241e-4, abs=5e-9)
    assert float(loss.objective(sums, Z_WEIGHT)) / 6 == pytest.approx(2.079874, abs=5e-7)
    assert float(sums.log_z) / 6 == pytest.approx(math.log(8), abs=5e-7)


@given(
    seed=st.integers(0, 2**32 - 1),
    spread=st.sampled_from([0.1, 3.0, 50.0]),
    shift=st.sampled_from([-300.0, 0.0, 300.0]),
)
@settings(max_examples=20)
def test_sums_are_those_of_a_loop_over_the_tokens_that_count(seed, spread, shift):
    logits_BLV, targets_BL, weights_BL = batch(seed, spread, shift)
    found = sums_of(logits_BLV, targets_BL, weights_BL)
    expected = numpy_sums(logits_BLV, targets_BL, weights_BL)
    # log Z is near `shift`, and float32 is good to 6e-8 of it; z has its square.
    near = 1e-6 * (abs(shift) + 100)
    np.testing.assert_allclose(found.cross_entropy, expected["cross_entropy"], atol=near)
    np.testing.assert_allclose(found.log_z, expected["log_z"], atol=near)
    np.testing.assert_allclose(found.z, expected["z"], rtol=1e-6, atol=1e-4)
    assert found.targets.tolist() == expected["targets"]
    assert found.targets.dtype == jnp.int32

    everything = np.ones_like(weights_BL)
    found = sums_of(logits_BLV, targets_BL)
    assert found.targets.tolist() == [4, 4, 4]
    expected = numpy_sums(logits_BLV, targets_BL, everything)
    np.testing.assert_allclose(found.cross_entropy, expected["cross_entropy"], atol=near)


def test_microbatches_are_averaged_by_target_and_not_by_microbatch():
    # With two words and target 0, a margin of log(e^c - 1) makes a cross-entropy of c.
    margin_BL = np.log(np.exp([[2.0, 9.0, 9.0], [1.0, 1.0, 1.0]]) - 1)
    logits_BLV = np.stack([0 * margin_BL, margin_BL], axis=-1).astype(np.float32)
    weights_BL = np.array([[True, False, False], [True, True, True]])
    targets_BL = np.zeros((2, 3), np.int32)

    parts = [
        total(sums_of(logits_BLV[i][None], targets_BL[:1], weights_BL[i][None])) for i in (0, 1)
    ]
    assert [float(p.cross_entropy) for p in parts] == pytest.approx([2.0, 3.0])
    assert [int(p.targets) for p in parts] == [1, 3]
    both = jax.tree.map(jnp.add, *parts)
    assert float(both.cross_entropy / both.targets) == pytest.approx(1.25)

    gradient_BLV = gradient_of(logits_BLV, targets_BL, weights_BL)
    for i in (0, 1):
        part = gradient_of(logits_BLV[i][None], targets_BL[:1], weights_BL[i][None])
        assert np.asarray(part[0]).tobytes() == np.asarray(gradient_BLV[i]).tobytes()
    # The mean over the targets of one batch of both, by another library.
    expected = np.asarray(optax_losses(logits_BLV, targets_BL))
    assert expected[weights_BL].mean() == pytest.approx(1.25)


# --- gradients ----------------------------------------------------------------------------


@pytest.mark.parametrize("z_weight", [0.0, 1e-4, 0.3])
def test_gradient_is_the_slope_of_the_loop(z_weight):
    logits_BLV, targets_BL, weights_BL = batch(0)
    gradient = gradient_of(logits_BLV, targets_BL, weights_BL, z_weight)

    def value(logits_BLV):
        sums = numpy_sums(logits_BLV, targets_BL, weights_BL)
        return sum(sums["cross_entropy"]) + z_weight * sum(sums["z"])

    for index in np.ndindex(logits_BLV.shape):
        moved = np.zeros(logits_BLV.shape)
        moved[index] = 1e-5
        slope = (value(logits_BLV + moved) - value(logits_BLV - moved)) / 2e-5
        assert float(gradient[index]) == pytest.approx(slope, abs=2e-6)


@given(seed=st.integers(0, 2**32 - 1), spread=st.sampled_from([0.1, 3.0, 50.0]))
@settings(max_examples=15)
def test_cross_entropy_and_its_gradient_are_those_of_optax(seed, spread):
    logits_BLV, targets_BL, _ = batch(seed, spread)

    found, _ = jax.jit(loss.token_losses)(logits_BLV, targets_BL)
    np.testing.assert_allclose(found, optax_losses(logits_BLV, targets_BL), rtol=1e-6, atol=1e-5)
    gradient = gradient_of(logits_BLV, targets_BL, None, 0.0)
    expected = optax_gradient_of(logits_BLV, targets_BL)
    # The softmax is exp(logit - log Z), and log Z is good to 6e-8 of some 100.
    np.testing.assert_allclose(gradient, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("z_weight", [1e-4, 0.1])
def test_z_loss_scales_the_softmax_in_the_gradient(z_weight):
    logits_BLV, targets_BL, _ = batch(2)
    exponentials = np.exp(logits_BLV.astype(np.float64))
    normaliser = exponentials.sum(axis=-1, keepdims=True)
    one_hot = np.eye(7)[targets_BL]
    expected = (1 + 2 * z_weight * np.log(normaliser)) * exponentials / normaliser - one_hot
    gradient = gradient_of(logits_BLV, targets_BL, None, z_weight)
    np.testing.assert_allclose(gradient, expected, rtol=0, atol=2e-6)


def test_both_results_of_a_token_have_their_own_gradient():
    logits_BLV, targets_BL, _ = batch(4)
    rng = np.random.default_rng(0)
    cotangents = tuple(rng.normal(size=(3, 4)).astype(np.float32) for _ in range(2))

    def plain(logits_BLV, targets_BL):
        log_z_BL = jax.nn.logsumexp(logits_BLV, axis=-1)
        chosen_BL = jnp.take_along_axis(logits_BLV, targets_BL[..., None], axis=-1)[..., 0]
        return log_z_BL - chosen_BL, log_z_BL

    @functools.partial(jax.jit, static_argnums=0)
    def gradient(losses, logits_BLV):
        return jax.vjp(lambda x: losses(x, targets_BL), logits_BLV)[1](cotangents)[0]

    found, expected = (gradient(f, logits_BLV) for f in (loss.token_losses, plain))
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("extreme", [1e30, 3e38])
def test_tokens_that_do_not_count_add_nothing_whatever_their_logits(extreme):
    logits_BLV, targets_BL, weights_BL = batch(1)
    assert 0 < weights_BL.sum() < weights_BL.size
    wild_V = np.float32(extreme) * np.array([1, 0, 1, 1, -1, 0, 1], np.float32)
    wild_BLV = np.where(weights_BL[..., None], logits_BLV, wild_V)

    @jax.jit
    def run(logits_BLV):
        sums_B = loss.sums_by_sequence(logits_BLV, targets_BL, weights_BL)
        return sums_B, gradient_of(logits_BLV, targets_BL, weights_BL)

    (plain, plain_gradient), (wild, wild_gradient) = run(logits_BLV), run(wild_BLV)
    for one, other in zip(plain, wild, strict=True):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()
    plain_gradient, wild_gradient = np.asarray(plain_gradient), np.asarray(wild_gradient)
    assert (plain_gradient[~weights_BL] == 0).all()
    assert (wild_gradient[~weights_BL] == 0).all()
    assert plain_gradient[weights_BL].tobytes() == wild_gradient[weights_BL].tobytes()
    assert (plain_gradient[weights_BL] != 0).all()


def test_huge_scores_that_count_have_a_finite_loss():
    logits_BLV = jnp.array([[[1e4, 0.0, -1e4], [-1e4, -1e4, -1e4]]])
    sums = total(sums_of(logits_BLV, jnp.array([[1, 0]])))
    # 1e4 - 0, and three equal scores.
    assert float(sums.cross_entropy) == pytest.approx(1e4 + math.log(3), rel=1e-6)
    gradient = gradient_of(logits_BLV, np.array([[1, 0]]))
    assert np.isfinite(gradient).all()


# --- logits -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_are_float32_products_over_the_root_of_the_width(dtype):
    rng = np.random.default_rng(0)
    hidden_BLD = jnp.asarray(rng.normal(size=(2, 3, 50)), dtype)
    table_VD = jnp.asarray(rng.normal(size=(16, 50)), dtype)
    found = loss.logits(hidden_BLD, table_VD, vocabulary_size=10)
    assert found.dtype == jnp.float32
    assert found.shape == (2, 3, 16)
    hidden, table = np.asarray(hidden_BLD, np.float64), np.asarray(table_VD, np.float64)
    expected = np.einsum("bld,vd->blv", hidden, table[:10]) / math.sqrt(50)
    # Of bfloat16 inputs too: a result rounded to bfloat16 would be off by some 0.01.
    np.testing.assert_allclose(found[..., :10], expected, rtol=0, atol=2e-6)


def test_padding_words_never_win_and_get_no_gradient():
    rng = np.random.default_rng(0)
    hidden_BLD = jnp.asarray(rng.normal(size=(2, 3, 5)), jnp.float32)
    table_VD = rng.normal(size=(16, 5)).astype(np.float32)
    loud_VD = table_VD.copy()
    loud_VD[10:] = 1e6 * np.sign(rng.normal(size=(6, 5)))  # scores far above all words'
    targets_BL = jnp.asarray(rng.integers(0, 10, (2, 3)))

    @jax.jit
    def run(hidden_BLD, table_VD):
        def value(hidden_BLD, table_VD):
            logits_BLV = loss.logits(hidden_BLD, table_VD, vocabulary_size=10)
            return objective(logits_BLV, targets_BL), logits_BLV

        return jax.value_and_grad(value, argnums=(0, 1), has_aux=True)(hidden_BLD, table_VD)

    (value, logits_BLV), (hidden_gradient, table_gradient) = run(hidden_BLD, loud_VD)
    assert (jnp.argmax(logits_BLV, axis=-1) < 10).all()
    assert (jax.nn.softmax(logits_BLV)[..., 10:] == 0).all()
    assert (np.asarray(table_gradient)[10:] == 0).all()
    assert (np.asarray(table_gradient)[:10] != 0).all()
    (quiet_value, _), (quiet_gradient, _) = run(hidden_BLD, table_VD)
    assert np.asarray(value).tobytes() == np.asarray(quiet_value).tobytes()
    assert np.asarray(hidden_gradient).tobytes() == np.asarray(quiet_gradient).tobytes()
    # Nor where every word's score is low.
    lowest = loss.logits(hidden_BLD * 0 - 1e15, jnp.ones((16, 5)), vocabulary_size=10)
    assert (jnp.argmax(lowest, axis=-1) < 10).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_logits_in_half_precision_are_refused(dtype):
    logits_BLV, targets_BL = jnp.zeros((1, 2, 3), dtype), jnp.zeros((1, 2), jnp.int32)
    with pytest.raises(TypeError, match=f"float32 logits, not {dtype}"):
        loss.sums_by_sequence(logits_BLV, targets_BL)
    with pytest.raises(TypeError, match=f"float32 logits, not {dtype}"):
        jax.jit(jax.grad(objective))(logits_BLV, targets_BL)


# --- targets ------------------------------------------------------------------------------


def test_the_target_of_a_position_is_the_next_token_of_its_own_row(small, monkeypatch):
    run = small(**{"model.sequence_length": 3})
    tokens_BL = np.array([[1, 2, 3, 4], [5, 6, 7, 8]], np.int32)
    captured: dict[str, Any] = {}
    hidden, sums_by_sequence = model.hidden, loss.sums_by_sequence

    def spy_hidden(params, ids_BL, **others):
        captured["inputs"] = ids_BL
        return hidden(params, ids_BL, **others)

    def spy_sums(logits_BLV, targets_BL, weights_BL, split):
        captured["targets"], captured["weights"] = targets_BL, weights_BL
        return sums_by_sequence(logits_BLV, targets_BL, weights_BL, split)

    monkeypatch.setattr(step.model, "hidden", spy_hidden)
    monkeypatch.setattr(step.loss, "sums_by_sequence", spy_sums)

    def losses(params, tokens, weights):
        sums_B = step.microbatch_losses(params, tokens, weights, run, end_of_document=256)
        return sums_B, dict(captured)

    whole = jax.sharding.PartitionSpec()
    params = jax.tree.map(
        lambda s: jnp.ones(s.shape, s.dtype),
        jax.eval_shape(lambda: model.init(jax.random.key(0), run.model)),
    )
    sums_B, seen = jax.jit(
        jax.shard_map(
            losses,
            mesh=sharding.make_mesh(run.mesh),
            in_specs=(whole, whole, whole),
            out_specs=whole,
            check_vma=False,
        )
    )(params, tokens_BL, jnp.array([True, False]))
    assert seen["inputs"].tolist() == [[1, 2, 3], [5, 6, 7]]
    # The last token of a row is a target only: it has no successor in its row.
    assert seen["targets"].tolist() == [[2, 3, 4], [6, 7, 8]]
    assert seen["weights"].tolist() == [[True] * 3, [False] * 3]
    assert sums_B.targets.tolist() == [3, 0]
    assert sums_B.cross_entropy[0] > 0
    assert sums_B.cross_entropy[1] == 0


# --- in chunks ---


def chunk_inputs(seed: int = 0):
    rng = np.random.default_rng(seed)
    hidden, table = rng.standard_normal((2, 12, 8)), rng.standard_normal((20, 8))
    targets = rng.integers(0, 17, (2, 12)).astype(np.int32)
    weights = rng.random((2, 12)) < 0.8
    return hidden.astype(np.float32), table.astype(np.float32), targets, weights


@pytest.mark.parametrize("length", [1, 4, 12])
def test_chunked_sums_and_gradients_are_those_of_all_logits_at_once(length):
    hidden, table, targets, weights = chunk_inputs()

    def whole(hidden, table):
        sums = loss.sums_by_sequence(loss.logits(hidden, table, 17), targets, weights)
        return loss.objective(jax.tree.map(jnp.sum, sums), 1e-2), sums

    def chunked(hidden, table):
        sums = loss.chunked_sums(hidden, table, targets, weights, 17, split.UNDIVIDED, length)
        return loss.objective(jax.tree.map(jnp.sum, sums), 1e-2), sums

    gradients = [
        jax.jit(jax.grad(way, argnums=(0, 1), has_aux=True))(hidden, table)
        for way in (whole, chunked)
    ]
    for one, other in zip(*map(jax.tree.leaves, gradients), strict=True):
        # 1e-5: the same terms in another order.
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_chunked_sums_never_hold_all_logits():
    hidden, table, targets, weights = chunk_inputs()

    def objective(hidden, table):
        sums = loss.chunked_sums(hidden, table, targets, weights, 17, split.UNDIVIDED, 3)
        return jnp.sum(sums.cross_entropy)

    text = jax.jit(jax.grad(objective, argnums=(0, 1))).lower(hidden, table).as_text()
    assert "2x3x20xf32" in text
    assert "2x12x20xf32" not in text


@pytest.mark.slow
def test_step_with_chunks_is_close_to_the_step_without(small):
    found = []
    for chunk in (None, 2):
        settings = small(**{"numerics.loss_chunk": chunk, "precision.policy": "bfloat16"})
        program = step.make_program(settings, sharding.make_mesh(settings.mesh), 256)
        tokens = np.random.default_rng(1).integers(0, 257, (8, 9)).astype(np.int32)
        _, vitals = program.step(program.init(), program.put(tokens), step.controls())
        found.append(jax.device_get(vitals))
    np.testing.assert_allclose(found[0]["loss"], found[1]["loss"], rtol=1e-6)
    # A chunk's part of the table's gradient is rounded to bfloat16 by itself.
    np.testing.assert_allclose(found[0]["gradient_norm"], found[1]["gradient_norm"], rtol=2e-3)
