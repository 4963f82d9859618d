"""The model against formulas.py, a NumPy reading of the papers written with loops.

Letters as in model.py.
"""

from __future__ import annotations

import functools
import math
import pathlib
from typing import Any

import formulas
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from palm_jax import attention, config, loss, model, precision, sharding, step
from palm_jax.decoder import embedding, norms, positions
from palm_jax.plan import parameters

# All sizes differ, so that no two axes can be taken for one another.
SIZES = {"N": 3, "D": 20, "H": 2, "K": 6, "F": 28, "V": 40}
LENGTH, WORDS, Z_WEIGHT = 9, 37, 0.05
OPTIONS: dict[str, dict[str, Any]] = {
    "palm": {},
    "layernorm": {"norm": "layernorm", "tied_embedding": False, "rope_base": 50.0},
    "qk_norm": {"qk_norm": True, "isolate_documents": True},
    "gpt": {
        "block": "serial",
        "norm": "layernorm",
        "final_norm_scale": True,
        "biases": True,
        "num_key_value_heads": SIZES["H"],
        "activation": "relu",
        "positions": "learned",
        "logit_scale": 0.3,
    },
    "grouped": {
        "num_heads": 6,
        "num_key_value_heads": 3,
        "positions": "alibi",
        "activation": "gelu",
        "embedding_norm": True,
        "embedding_scale": 0.5,
        "isolate_documents": True,
        "biases": True,
    },
    "deepnorm": {
        "block": "deepnorm",
        "num_key_value_heads": SIZES["H"],
        "activation": "geglu",
        "norm": "layernorm",
        "qk_norm": True,
        "positions": "none",
        "mup_base_width": 10,
        "mup_base_head_size": 3,
        "logit_scale": 0.5,
    },
}
IDS_BL = np.random.default_rng(1).integers(0, WORDS, (2, LENGTH + 1)).astype(np.int32)
END = int(IDS_BL[0, 3])  # so that a document ends inside the first row


# Compiles in half the time. For results compared within tolerances or with one another.
quick_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def model_settings(**changes: Any) -> config.Model:
    return config.Model.model_validate(
        {
            "num_layers": SIZES["N"],
            "width": SIZES["D"],
            "num_heads": SIZES["H"],
            "head_size": SIZES["K"],
            "feed_forward": SIZES["F"],
            "vocabulary_size": WORDS,
            "vocabulary_multiple": 8,
            "sequence_length": LENGTH,
        }
        | changes
    )


@functools.cache
def shapes(m: config.Model) -> Any:
    return jax.eval_shape(lambda: model.init(jax.random.key(0), m))


def random_params(m: config.Model) -> model.Params:
    """Parameters of no special value: initial norm scales are zero and would hide faults."""
    rng = np.random.default_rng(0)

    def leaf(path: Any, shape: Any) -> jax.Array:
        spread = 1.0 if "embedding" in path[-1].key else 0.3
        return jnp.asarray(rng.normal(size=shape.shape) * spread, jnp.float32)

    return jax.tree_util.tree_map_with_path(leaf, shapes(m))


def in_float64(tree: Any) -> Any:
    return jax.tree.map(lambda x: np.asarray(x, np.float64), tree)


# --- the same through the package ---------------------------------------------------------


def objective(
    params: model.Params, m: config.Model, dtype: Any = jnp.float32
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """The summed objective over IDS_BL, with hidden states and logits."""
    inputs_BL, targets_BL = jnp.asarray(IDS_BL[:, :-1]), jnp.asarray(IDS_BL[:, 1:])
    documents_BL = attention.document_numbers(inputs_BL, END) if m.isolate_documents else None
    hidden_BLD = model.hidden(params, inputs_BL, settings=m, dtype=dtype, documents_BL=documents_BL)
    logits_BLV = loss.logits(
        hidden_BLD, model.unembedding(params), m.vocabulary_size, scale=m.output_scale
    )
    sums_B = loss.sums_by_sequence(logits_BLV, targets_BL)
    sums = jax.tree.map(jnp.sum, sums_B)
    return loss.objective(sums, Z_WEIGHT), (hidden_BLD, logits_BLV)


@functools.cache
def evaluated(m: config.Model) -> tuple[Any, Any]:
    """((objective, (hidden, logits)), gradients) at `random_params`."""
    run = jax.value_and_grad(functools.partial(objective, m=m), has_aux=True)
    return quick_jit(run)(random_params(m))


@pytest.mark.parametrize("options", OPTIONS)
def test_hidden_states_and_logits_are_those_of_the_papers_formulas(options):
    m = model_settings(**OPTIONS[options])
    (value, (hidden_BLD, logits_BLV)), _ = evaluated(m)
    params = in_float64(random_params(m))
    inputs_BL = IDS_BL[:, :-1]
    documents_BL = formulas.documents(inputs_BL, END) if m.isolate_documents else None
    expected_BLD = formulas.hidden(params, inputs_BL, m, documents_BL)
    # Normalised values are about 1, float32 is good to 6e-8, and three layers with sums of
    # up to 28 products each lose a factor of some ten.
    np.testing.assert_allclose(hidden_BLD, expected_BLD, rtol=0, atol=1e-5)
    expected_BLV = formulas.logits(expected_BLD, params, m)
    np.testing.assert_allclose(logits_BLV[..., :WORDS], expected_BLV, rtol=0, atol=1e-5)
    assert float(value) == pytest.approx(
        formulas.objective(params, IDS_BL, m, END, Z_WEIGHT), rel=1e-5
    )


@pytest.mark.parametrize("options", OPTIONS)
def test_gradients_are_the_slopes_of_the_papers_formulas(options):
    m = model_settings(**OPTIONS[options])
    _, gradients = evaluated(m)
    params = in_float64(random_params(m))
    leaves, structure = jax.tree.flatten(params)
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    rng = np.random.default_rng(3)
    for index, gradient in enumerate(jax.tree.leaves(gradients)):
        direction = rng.normal(size=leaves[index].shape)
        sides = []
        for sign in (1, -1):
            moved = list(leaves)
            moved[index] = leaves[index] + sign * 1e-5 * direction
            sides.append(
                formulas.objective(jax.tree.unflatten(structure, moved), IDS_BL, m, END, Z_WEIGHT)
            )
        slope = (sides[0] - sides[1]) / 2e-5
        # Terms of either sign cancel in the slope: what counts is the error against them.
        size = float(np.linalg.norm(np.asarray(gradient, np.float64) * direction))
        found = float(np.sum(gradient * direction))
        if paths[index][-1].key.startswith("key_bias") and m.positions != "rotary":
            # It shifts all scores of a query alike, which softmax does not see.
            assert abs(found) < 1e-6
            assert abs(slope) < 1e-6
            continue
        assert found == pytest.approx(slope, abs=3e-5 * size)
        assert size > 0


# --- rematerialization --------------------------------------------------------------------


def saved_for_backward(m: config.Model) -> list[tuple[int, ...]]:
    """Shapes of the arrays that the forward pass keeps."""
    run = functools.partial(objective, m=m)
    kept = jax.eval_shape(lambda params: jax.vjp(run, params, has_aux=True)[1], shapes(m))
    return [leaf.shape for leaf in jax.tree.leaves(kept)]


def test_remat_policies_keep_what_their_names_say():
    n, heads, feed_forward = SIZES["N"], SIZES["H"], SIZES["F"]
    num_scores = n * 2 * heads * LENGTH * LENGTH  # in any order of axes
    kept = {
        policy: saved_for_backward(model_settings(remat=policy))
        for policy in ("none", "attention", "dots", "full")
    }
    has_scores = {policy: num_scores in map(math.prod, arrays) for policy, arrays in kept.items()}
    assert has_scores == {"none": True, "attention": False, "dots": False, "full": False}
    gates = (n, 2 * LENGTH, feed_forward)
    num_gates = {policy: arrays.count(gates) for policy, arrays in kept.items()}
    assert num_gates["none"] > num_gates["attention"] == num_gates["dots"] == 2
    assert num_gates["full"] == 0
    elements = [sum(map(math.prod, kept[policy])) for policy in kept]
    assert elements == sorted(elements, reverse=True)
    assert len(set(elements)) == 4


@pytest.mark.parametrize("policy", ["full", "dots", "attention"])
def test_recomputing_changes_neither_the_loss_nor_its_gradient(policy):
    # With documents isolated, so that a mask lost in the second computation would show.
    plain, again = (
        evaluated(model_settings(**OPTIONS["qk_norm"], **remat))
        for remat in ({}, {"remat": policy})
    )
    assert np.asarray(plain[0][0]).tobytes() == np.asarray(again[0][0]).tobytes()
    for expected, found in zip(jax.tree.leaves(plain[1]), jax.tree.leaves(again[1]), strict=True):
        # XLA fuses the second computation differently, so the last bits may differ.
        spread = float(np.abs(expected).max())
        np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6 * spread)


def test_depth_does_not_change_the_size_of_the_program():
    sizes = []
    for num_layers in (2, 16):
        m = model_settings(num_layers=num_layers, remat="full")
        gradient = jax.jit(jax.grad(functools.partial(objective, m=m), has_aux=True))
        sizes.append(len(gradient.lower(shapes(m)).as_text().splitlines()))
    assert sizes[0] == sizes[1]


# --- what a position can see --------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_token_changes_no_hidden_state_before_it(dtype):
    m = model_settings()
    params = jax.tree.map(lambda p: p.astype(dtype), random_params(m))
    run = quick_jit(functools.partial(model.hidden, settings=m, dtype=jnp.dtype(dtype)))
    ids_BL = IDS_BL[:, :-1]
    before = np.asarray(run(params, ids_BL))
    for position in (0, 4, LENGTH - 1):
        changed_BL = ids_BL.copy()
        changed_BL[:, position] = (changed_BL[:, position] + 1) % WORDS
        after = np.asarray(run(params, changed_BL))
        assert after[:, :position].tobytes() == before[:, :position].tobytes()
        for later in range(position, LENGTH):
            assert (after[:, later] != before[:, later]).any()


@pytest.mark.parametrize("options", ["palm", "gpt", "grouped", "deepnorm"])
def test_tokens_after_a_position_get_zero_gradient_from_it(options):
    m = model_settings(remat="full", **OPTIONS[options])
    params = random_params(m)
    ids_BL = np.arange(LENGTH)[None]  # each position has a row of the table to itself
    direction_D = jnp.asarray(np.random.default_rng(0).normal(size=SIZES["D"]), jnp.float32)

    @quick_jit
    def gradient(table_VD, position):
        def value(table_VD):
            hidden_BLD = model.hidden(
                params | {"embedding_VD": table_VD}, ids_BL, settings=m, dtype=jnp.float32
            )
            return hidden_BLD[0, position] @ direction_D

        return jax.grad(value)(table_VD)

    for position in (0, 3, LENGTH - 1):
        rows_VD = np.asarray(gradient(params["embedding_VD"], position))
        assert (rows_VD[: position + 1] != 0).any(axis=1).all()
        assert (rows_VD[position + 1 :] == 0).all()


@pytest.mark.parametrize(
    ("isolate", "policy"), [(True, "float32"), (True, "bfloat16"), (False, "float32")]
)
def test_isolated_documents_do_not_change_each_others_logits(small, monkeypatch, isolate, policy):
    run = small(**{"model.isolate_documents": isolate, "precision.policy": policy})
    end, length = 256, run.model.sequence_length
    tokens_BL = np.array([[1, 2, 3, end, 4, 5, 6, 7, 8]], np.int32)
    changed_BL = np.array([[9, 8, 7, end, 4, 5, 6, 7, 8]], np.int32)
    assert tokens_BL.shape[1] == length + 1
    # What the step computes, up to the logits.
    monkeypatch.setattr(step.loss, "sums_by_sequence", lambda logits, *_: logits)
    mesh = sharding.make_mesh(run.mesh)
    whole = jax.sharding.PartitionSpec()
    logits = quick_jit(
        jax.shard_map(
            lambda params, tokens: step.microbatch_losses(params, tokens, None, run, end),
            mesh=mesh,
            in_specs=(whole, whole),
            out_specs=whole,
            check_vma=False,
        )
    )
    params = random_params(run.model)
    before, after = (np.asarray(logits(params, x)) for x in (tokens_BL, changed_BL))
    assert before.dtype == np.float32
    assert before[:, :4].tobytes() != after[:, :4].tobytes()
    assert (before[:, 4:].tobytes() == after[:, 4:].tobytes()) == isolate


# --- rotary embedding ---------------------------------------------------------------------


def test_rotary_frequencies_fall_from_one_to_almost_the_base():
    cosine_LK, sine_LK = positions.rotary_tables(2, 256, 10000.0)
    frequency_K = np.arctan2(sine_LK[1], cosine_LK[1])
    assert frequency_K.shape == (128,)
    assert frequency_K[[0, 1, -1]] == pytest.approx([1, 0.930572, 1.07461e-4], rel=1e-5)


def test_rotary_angles_are_not_rounded_at_far_positions():
    cosine_LK, sine_LK = positions.rotary_tables(2048, 256, 10000.0)
    assert cosine_LK.dtype == sine_LK.dtype == np.float32
    far = [256, 257, 2047]
    assert cosine_LK[far, 0] == pytest.approx([-0.0398, 0.8193, 0.2497], abs=5e-5)
    for position in far:
        for pair in (0, 1, 64, 127):
            angle = position * 10000.0 ** (-2 * pair / 256)
            assert cosine_LK[position, pair] == pytest.approx(math.cos(angle), abs=1e-7)
            assert sine_LK[position, pair] == pytest.approx(math.sin(angle), abs=1e-7)


def test_bfloat16_activations_tell_position_256_from_257(monkeypatch):
    m = model_settings(num_layers=1, sequence_length=258)
    params = random_params(m)
    # Attention outweighs the rest of the residual stream.
    params["layers"]["w_attention_HKD"] *= 20
    params["layers"]["w_down_FD"] *= 0
    # In row 0 position 256 sees position 0 and itself, in row 1 position 257 does. All tokens
    # but the first are equal, so the two results differ by the angle alone.
    ids_BL, documents_BL = np.full((2, 258), 10, np.int32), np.zeros((2, 258), np.int32)
    ids_BL[:, 0] = 3
    for row, position in enumerate((256, 257)):
        documents_BL[row, [0, position]] = 1
    seen: list[jax.Array] = []
    rotate = positions.rotate

    def spy(x, tables):
        seen.extend([x, *tables])
        return rotate(x, tables)

    monkeypatch.setattr(positions, "rotate", spy)
    hidden_BLD = quick_jit(
        lambda params, documents_BL: model.hidden(
            params, ids_BL, settings=m, dtype=jnp.bfloat16, documents_BL=documents_BL
        )
    )(jax.tree.map(lambda p: p.astype(jnp.bfloat16), params), documents_BL)
    assert {x.dtype for x in seen} == {np.dtype(np.float32)}
    assert hidden_BLD.dtype == jnp.bfloat16
    found = [np.asarray(hidden_BLD[row, 256 + row], np.float64) for row in (0, 1)]
    reference_BLD = formulas.hidden(in_float64(params), ids_BL, m, documents_BL)
    expected = [reference_BLD[row, 256 + row] for row in (0, 1)]
    difference = expected[1] - expected[0]
    # bfloat16 has eight bits, so values near 1 are off by some 0.01.
    assert np.abs(difference).max() > 1
    np.testing.assert_allclose(found[1] - found[0], difference, rtol=0, atol=0.05)


# --- norms, embedding ----------------------------------------------------------------------


def divisions(jaxpr: Any) -> list[tuple[Any, Any]]:
    """(numerator, denominator) of every division in a program and in the programs inside it."""
    found = [tuple(e.invars) for e in jaxpr.eqns if e.primitive.name == "div"]
    for value in (v for e in jaxpr.eqns for v in jax.tree.leaves(list(e.params.values()))):
        inner = getattr(value, "jaxpr", value)  # of a closed one
        if hasattr(inner, "eqns"):
            found += divisions(inner)
    return found


@pytest.mark.parametrize("options", ["palm", "layernorm", "qk_norm"])
def test_loss_and_gradient_divide_no_array_by_a_sum_over_its_row(options):
    # XLA may turn that into a multiplication by the reciprocal, or not.
    m = model_settings(**OPTIONS[options], remat="attention")
    program = jax.make_jaxpr(jax.grad(functools.partial(objective, m=m), has_aux=True))
    found = divisions(program(shapes(m)).jaxpr)
    assert found  # the softmax's sums at least
    for numerator, _ in found:  # one number a row at most: 1 / sum, and the norms'
        assert numerator.aval.shape[-1:] in ((), (1,))


@pytest.mark.parametrize("kind", ["rms", "layernorm"])
def test_norms_of_bfloat16_are_computed_in_float32(kind):
    x = jnp.asarray(np.random.default_rng(0).normal(3.0, 5.0, size=(4, 300)), jnp.bfloat16)
    found = jax.jit(norms.normalise, static_argnums=1)(x, kind)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, formulas.norm(in_float64(x), kind), rtol=0, atol=2e-6)
    assert (np.asarray(norms.normalise(np.zeros((1, 4)), kind)) == 0).all()


def test_a_frequent_tokens_gradient_is_summed_in_float32():
    ids_BL = np.zeros((4, 250), np.int32)
    ids_BL[0, 0] = 2

    def total(table_VD):
        return jnp.sum(embedding.embed(table_VD, ids_BL).astype(jnp.float32))

    gradient_VD = jax.jit(jax.grad(total))(np.ones((3, 2), jnp.bfloat16))
    assert gradient_VD.dtype == jnp.bfloat16
    # 999 is rounded to bfloat16 once, at the end; a bfloat16 sum stays at 256.
    assert np.asarray(gradient_VD, np.float64).tolist() == [[1000, 1000], [0, 0], [1, 1]]


def test_bfloat16_compute_stays_near_float64():
    m = model_settings(qk_norm=True)
    params = random_params(m)
    low = jax.tree_util.tree_map_with_path(
        lambda path, p: p.astype(precision.parameter_compute_dtype(path[-1].key, jnp.bfloat16)),
        params,
    )
    run = functools.partial(objective, m=m, dtype=jnp.bfloat16)
    value, (hidden_BLD, logits_BLV) = quick_jit(run)(low)
    assert hidden_BLD.dtype == jnp.bfloat16
    assert logits_BLV.dtype == value.dtype == jnp.float32
    expected_BLD = formulas.hidden(in_float64(params), IDS_BL[:, :-1], m)
    error = np.asarray(hidden_BLD, np.float64) - expected_BLD
    # Every product and sum is rounded to eight bits, some forty times a layer.
    assert math.sqrt((error**2).mean()) < 0.03
    # Float32 would be two thousand times nearer: the rounding does take place.
    assert math.sqrt((error**2).mean()) > 1e-3
    gradients, _ = jax.eval_shape(jax.grad(run, has_aux=True), low)
    assert jax.tree.map(lambda g: g.dtype, gradients) == jax.tree.map(lambda p: p.dtype, low)


# --- parameters ---------------------------------------------------------------------------


@pytest.mark.parametrize("options", OPTIONS)
def test_the_letters_of_a_name_are_the_axes_of_the_array(options):
    m = model_settings(**OPTIONS[options])
    for path, leaf in jax.tree_util.tree_leaves_with_path(shapes(m)):
        letters = ("N" if path[0].key == "layers" else "") + path[-1].key.rpartition("_")[2]
        assert leaf.shape == tuple(parameters.sizes(m)[letter] for letter in letters)
        assert leaf.dtype == jnp.float32


def test_options_add_the_parameters_they_need_and_no_others():
    def names(**changes):
        tree = shapes(model_settings(**changes))
        return {path[-1].key for path, _ in jax.tree_util.tree_leaves_with_path(tree)}

    plain = names()
    assert len(plain) == 9  # embedding, one norm, q, k, v, attention output, gate, up, down
    assert names(norm="layernorm", isolate_documents=True, remat="full") == plain
    assert names(qk_norm=True) - plain == {"query_norm_scale_K", "key_norm_scale_K"}
    assert names(tied_embedding=False) - plain == {"unembedding_VD"}


def num_elements(m: config.Model) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes(m)))


@given(
    num_layers=st.integers(1, 5),
    width=st.integers(1, 33),
    num_heads=st.integers(1, 4),
    head_size=st.integers(1, 5).map(lambda half: 2 * half),
    feed_forward=st.none() | st.integers(1, 40),
    vocabulary_size=st.integers(2, 300),
    tied_embedding=st.booleans(),
    qk_norm=st.booleans(),
    norm=st.sampled_from(["rms", "layernorm"]),
    block=st.sampled_from(["parallel", "serial", "deepnorm"]),
    biases=st.booleans(),
    activation=st.sampled_from(["swiglu", "geglu", "gelu", "relu"]),
    positions=st.sampled_from(["rotary", "learned", "alibi", "none"]),
    embedding_norm=st.booleans(),
    final_norm_scale=st.booleans(),
    is_multi_head=st.booleans(),
)
@settings(max_examples=25)
def test_the_arrays_hold_as_many_parameters_as_planned(is_multi_head, **changes):
    if changes["block"] == "deepnorm":
        changes["final_norm_scale"] = False
    groups = changes["num_heads"] if is_multi_head else 1
    m = model_settings(**changes, num_key_value_heads=groups)
    assert num_elements(m) == parameters.number(m, padded=True)


@pytest.mark.parametrize(
    ("name", "count", "count_with_padding"),
    [
        ("palm_8b", 8_632_008_704, 8_632_532_992),
        ("palm_62b", 62_495_653_888, 62_496_702_464),
        ("palm_540b", 540_356_456_448, 540_358_815_744),
    ],
)
def test_full_size_models_have_the_papers_number_of_parameters(name, count, count_with_padding):
    file = pathlib.Path(__file__).parents[1] / "configs" / f"{name}.yaml"
    m = config.load(file).model.model_copy(update={"vocabulary_multiple": 128})
    assert num_elements(m) == count
    assert num_elements(m.model_copy(update={"vocabulary_size": 256_001})) == count_with_padding


def initial(mesh: tuple[int, int, int], jit: Any = jax.jit) -> model.Params:
    """Parameters drawn on a data x fsdp x tensor mesh."""
    m = model_settings(
        num_layers=2,
        width=64,
        num_heads=8,
        feed_forward=200,
        vocabulary_size=257,
        tied_embedding=False,
        qk_norm=True,
    )
    data, fsdp, tensor = mesh
    devices = sharding.make_mesh(config.Mesh(data=data, fsdp=fsdp, tensor=tensor))
    places = sharding.shardings(devices, shapes(m))
    return jit(lambda: model.init(jax.random.key(7), m), out_shardings=places)()


def test_initial_values_are_normal_with_the_papers_spread():
    params = initial((1, 1, 1), quick_jit)
    D, HK, F = 64, 8 * 6, 200
    num_inputs = {
        "w_query_DHK": D,
        "w_key_DK": D,
        "w_value_DK": D,
        "w_attention_HKD": HK,
        "w_gate_DF": D,
        "w_up_DF": D,
        "w_down_FD": F,
        "embedding_VD": 1,
        "unembedding_VD": 1,
    }
    flat = {path[-1].key: leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
    scales = {"norm_scale_D", "query_norm_scale_K", "key_norm_scale_K"}
    assert set(flat) == set(num_inputs) | scales
    for name in scales:
        assert (np.asarray(flat[name]) == 0).all()
    for name, n_in in num_inputs.items():
        unit = np.asarray(flat[name], np.float64).ravel() * math.sqrt(n_in)
        # Four standard errors of a sample of a normal distribution.
        assert unit.mean() == pytest.approx(0, abs=4 / math.sqrt(unit.size))
        assert unit.std() == pytest.approx(1, abs=4 / math.sqrt(2 * unit.size))
        # A truncated normal would end at 2.3 standard deviations.
        assert np.mean(np.abs(unit) > 2.4) == pytest.approx(0.0164, abs=0.014)
        halves = unit[: unit.size // 2 * 2].reshape(2, -1)  # of a stacked leaf: its layers
        assert abs(np.corrcoef(halves)[0, 1]) < 5 / math.sqrt(halves.shape[1])
    for one, other in (
        ("w_key_DK", "w_value_DK"),
        ("w_gate_DF", "w_up_DF"),
        ("embedding_VD", "unembedding_VD"),
    ):
        pair = np.stack([np.asarray(flat[name]).ravel() for name in (one, other)])
        assert abs(np.corrcoef(pair)[0, 1]) < 5 / math.sqrt(pair.shape[1])


@pytest.mark.slow  # test_step has one mesh that is not
def test_initial_bits_do_not_depend_on_the_mesh():
    expected = jax.tree.leaves(jax.device_get(initial((1, 1, 1))))
    for mesh in ((8, 1, 1), (1, 8, 1), (1, 4, 2), (1, 1, 8)):
        found = initial(mesh)
        held = found["layers"]["w_gate_DF"].addressable_shards[0].data.shape
        assert held == (2, 64 // mesh[1], 200 // mesh[2])
        for one, other in zip(jax.tree.leaves(found), expected, strict=True):
            assert np.asarray(one).tobytes() == other.tobytes()


# --- number formats -----------------------------------------------------------------------


def test_all_but_kernels_and_tables_of_tokens_stay_float32_in_bfloat16_compute():
    formats = {
        name: precision.parameter_compute_dtype(name, jnp.dtype(jnp.bfloat16)).name
        for m in (model_settings(**options) for options in OPTIONS.values())
        for name in (path[-1].key for path, _ in jax.tree_util.tree_leaves_with_path(shapes(m)))
    }
    narrow = {name for name, dtype in formats.items() if dtype == "bfloat16"}
    tables = {"embedding_VD", "unembedding_VD"}
    assert narrow == tables | {name for name in formats if name.startswith("w_")}
    assert len(set(formats) - narrow) == 18
    assert set(formats.values()) == {"float32", "bfloat16"}


@pytest.mark.parametrize("policy", ["float32", "bfloat16"])
def test_a_policy_names_the_format_of_the_products(policy):
    dtype = precision.compute_dtype(config.Precision(policy=policy))
    assert dtype == jnp.dtype(policy)


def test_compiler_options_keep_every_rounding_to_bfloat16():
    options = precision.compiler_options("cpu", "canonical")
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.normal(size=(32, 32)), jnp.bfloat16) for _ in range(2))
    # XLA would leave out the rounding of the product: it sees the conversion that follows.
    product = jax.jit(lambda x, w: (x @ w).astype(jnp.float32), compiler_options=options)(x, w)
    np.testing.assert_array_equal(product, product.astype(jnp.bfloat16).astype(jnp.float32))
