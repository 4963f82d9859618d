"""What a step measures: each vital against NumPy, its bits on any mesh, no other bit changed."""

# L length, D model, H heads, K head size, V vocabulary, T tokens

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from palm_jax import (
    attention,
    config,
    loss,
    model,
    modules,
    reductions,
    sharding,
    step,
    train,
    vitals,
)
from palm_jax.corpus.reader import Corpus
from palm_jax.record import logbook
from palm_jax.record.folder import RunFolder
from palm_jax.replay import replay as replaying

END = 256


@pytest.fixture(scope="module")
def small(small):
    return lambda **overrides: small(**{"log.vitals": "all", **overrides})


def tokens_of(settings, index: int = 0, num_sequences: int = 16) -> np.ndarray:
    shape = (num_sequences, settings.model.sequence_length + 1)
    return np.random.default_rng((5, index)).integers(0, 257, shape).astype(np.int32)


PROGRAMS: dict[str, step.Program] = {}


def program_for(settings) -> step.Program:
    """One for equal settings, because compiling takes longest here."""
    key = settings.model_dump_json()
    if key not in PROGRAMS:
        PROGRAMS[key] = step.make_program(settings, sharding.make_mesh(settings.mesh), END)
    return PROGRAMS[key]


def take_steps(settings, num_steps: int):
    """(state before the last step, state after it, its vitals), on the host."""
    program = program_for(settings)
    state = program.init()
    for index in range(num_steps):
        before = jax.device_get(state)
        batch = program.put(tokens_of(settings, index))
        state, found = program.step(state, batch, step.controls())
    return before, jax.device_get(state), jax.device_get(found)


def as_bytes(tree) -> dict[str, bytes]:
    return {
        jax.tree_util.keystr(path): np.asarray(leaf).tobytes()
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


# --- of the forward pass, layer by layer, in float64 ---


def normalised(x, kind):
    if kind == "layernorm":
        x = x - x.mean(axis=-1, keepdims=True)
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + 1e-6)


def rotated(x_LHK, base):
    L, _, K = x_LHK.shape
    angles = np.arange(L)[:, None] / base ** (np.arange(0, K, 2) / K)
    turns = np.exp(1j * angles)[:, None]
    pairs = (x_LHK[..., : K // 2] + 1j * x_LHK[..., K // 2 :]) * turns
    return np.concatenate([pairs.real, pairs.imag], axis=-1)


def sequence_by_hand(params, tokens_L, m):
    """What one sequence shows: streams, what layers add to them, their attention, output logits."""
    ids = tokens_L[:-1]
    x_LD = params["embedding_VD"][ids]
    seen = {"residual": [x_LD], "added": [], "logits": [], "entropy": []}
    documents = np.cumsum(np.r_[0, (ids == END)[:-1]])
    for n in range(m.num_layers):
        w = {name: leaf[n] for name, leaf in params["layers"].items()}
        y_LD = normalised(x_LD, m.norm) * (1 + w["norm_scale_D"])
        query = np.einsum("ld,dhk->lhk", y_LD, w["w_query_DHK"])
        key = (y_LD @ w["w_key_DK"])[:, None]
        if m.qk_norm:
            query = normalised(query, "layernorm") * (1 + w["query_norm_scale_K"])
            key = normalised(key, "layernorm") * (1 + w["key_norm_scale_K"])
        query, key = rotated(query, m.rope_base) / np.sqrt(m.head_size), rotated(key, m.rope_base)
        value = y_LD @ w["w_value_DK"]
        heads, logits, entropies = np.zeros_like(query), [], np.zeros(query.shape[:2])
        for t in range(len(ids)):
            keys = [
                s for s in range(t + 1) if not m.isolate_documents or documents[s] == documents[t]
            ]
            for h in range(m.num_heads):
                scores = np.array([query[t, h] @ key[s, 0] for s in keys])
                weights = np.exp(scores) / np.exp(scores).sum()
                heads[t, h] = weights @ value[keys]
                entropies[t, h] = -(weights * np.log(weights)).sum()
                logits += scores.tolist()
        gate = y_LD @ w["w_gate_DF"]
        hidden = gate / (1 + np.exp(-gate)) * (y_LD @ w["w_up_DF"])
        added = hidden @ w["w_down_FD"] + np.einsum("lhk,hkd->ld", heads, w["w_attention_HKD"])
        x_LD = x_LD + added
        seen["residual"].append(x_LD)
        seen["added"].append(added)
        seen["logits"].append(max(logits))
        seen["entropy"].append(entropies)
    table_VD = params.get("unembedding_VD", params["embedding_VD"])[: m.vocabulary_size]
    seen["output"] = normalised(x_LD, m.norm) @ table_VD.T / np.sqrt(m.width)
    return seen


def rms(arrays) -> float:
    return np.sqrt(np.mean(np.square(np.concatenate([np.ravel(a) for a in arrays]))))


def perturbed(state):
    """Norm scales that are not zero, and layers that differ more than fresh ones do."""
    rng = np.random.default_rng(1)

    def change(x):
        return jax.device_put(np.asarray(x) + 0.1 * rng.standard_normal(x.shape).astype(np.float32))

    return state.replace(params=jax.tree.map(change, state.params))


FORWARD = {
    "plain": {"numerics.lanes": 4, "numerics.microbatch": 2},
    "long": {"model.sequence_length": 24, "model.remat": "attention"},
    "options": {
        "model.qk_norm": True,
        "model.norm": "layernorm",
        "model.isolate_documents": True,
        "model.tied_embedding": False,
        "model.remat": "full",
        "numerics.loss_chunk": 4,
    },
}


@pytest.mark.parametrize(
    "name", ["plain", *(pytest.param(n, marks=pytest.mark.slow) for n in ("long", "options"))]
)
def test_forward_vitals_are_those_of_layers_computed_by_hand(small, name):
    settings = small(**FORWARD[name])
    m, microbatch = settings.model, settings.numerics.microbatch
    program = program_for(settings)
    tokens = tokens_of(settings)
    tokens[:, 3] = END
    state = perturbed(program.init())
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), state.params)
    _, found = program.step(state, program.put(tokens), step.controls())
    by_hand = [sequence_by_hand(params, row, m) for row in tokens]
    queries = attention.observed_queries(m.sequence_length)
    assert len(queries) == 8
    assert queries[-1] == m.sequence_length - 1
    for n in range(m.num_layers):
        before = rms([s["residual"][n] for s in by_hand])
        added, after = (
            rms([s[k][n + i] for s in by_hand]) for k, i in [("added", 0), ("residual", 1)]
        )
        entropy = np.mean([s["entropy"][n][queries] for s in by_hand[::microbatch]])
        largest = max(s["logits"][n] for s in by_hand)
        # 1e-5: float32 against float64.
        np.testing.assert_allclose(found["layers/residual_rms"][n], after, rtol=1e-5)
        np.testing.assert_allclose(found["layers/branch_ratio"][n], added / before, rtol=1e-5)
        np.testing.assert_allclose(found["layers/max_attention_logit"][n], largest, rtol=1e-5)
        np.testing.assert_allclose(found["layers/attention_entropy"][n], entropy, rtol=1e-5)
    assert found["max_attention_logit"] == max(found["layers/max_attention_logit"])
    np.testing.assert_allclose(
        found["attention_entropy"], np.mean(found["layers/attention_entropy"]), rtol=1e-6
    )
    output_TV = np.concatenate([s["output"] for s in by_hand])
    log_z = np.log(np.exp(output_TV).sum(axis=1))
    np.testing.assert_allclose(found["max_log_z"], log_z.max(), rtol=1e-5)
    np.testing.assert_allclose(found["mean_log_z"], log_z.mean(), rtol=1e-5)
    # Of numbers of both signs, which cancel.
    np.testing.assert_allclose(found["mean_logit"], output_TV.mean(), rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_splash_shows_the_observed_queries_alone():
    rng = np.random.default_rng(0)
    query, key, value = (
        jnp.asarray(rng.standard_normal(shape), jnp.float32)
        for shape in [(2, 128, 2, 8), (2, 128, 8), (2, 128, 8)]
    )
    query = query.at[0, 3].multiply(10)  # not one of the observed
    observe = functools.partial(attention.observed, query, key, value)
    _, every = jax.jit(functools.partial(observe, kind="xla"))()
    _, some = jax.jit(functools.partial(observe, kind="splash", interpret=True))()
    queries = attention.observed_queries(128)
    logits = [query[0, t, h] @ key[0, s] for t in queries for h in range(2) for s in range(t + 1)]
    np.testing.assert_allclose(some.largest_logit, max(logits), rtol=1e-5)
    assert some.largest_logit < every.largest_logit
    np.testing.assert_allclose(some.entropy, every.entropy, rtol=1e-6)


# --- of gradient, parameters and update ---


def mean_objective(params, tokens, settings):
    """Over all tokens at once, without microbatches or gathers."""
    hidden = model.hidden(
        params, tokens[:, :-1], settings=settings.model, dtype=jnp.dtype(jnp.float32)
    )
    logits = loss.logits(hidden, model.unembedding(params), settings.model.vocabulary_size)
    sums = loss.sums_by_sequence(logits, tokens[:, 1:])
    value = sums.cross_entropy.sum() + settings.model.z_loss * sums.z.sum()
    return value / tokens[:, 1:].size


def groups(tree, settings):
    """{"layers": a list of leaves for each layer, "embedding": [leaf]}, in float64."""
    wide = jax.tree.map(lambda x: np.asarray(x, np.float64), tree)
    found = {k.removesuffix("_VD"): [wide[k]] for k in wide if k != "layers"}
    leaves = jax.tree.leaves(wide["layers"])
    return found | {"layers": [[x[n] for x in leaves] for n in range(settings.model.num_layers)]}


def per_group(function, tree, settings):
    found = groups(tree, settings)
    return {
        name: np.array([function(x) for x in found[name]])
        if name == "layers"
        else function(found[name])
        for name in found
    }


CLIPPED = {"optimizer.clip_norm": 0.25}


@pytest.mark.parametrize(
    "options",
    [
        CLIPPED,
        pytest.param(
            {
                "optimizer.clip_norm": None,
                "model.tied_embedding": False,
                "optimizer.update_clip": None,
            },
            marks=pytest.mark.slow,
        ),
        pytest.param({"optimizer.name": "adamw", "schedule.peak": 0.003}, marks=pytest.mark.slow),
    ],
)
def test_vitals_of_the_update_are_those_of_each_group_s_arrays(small, options):
    settings = small(**options)
    before, after, found = take_steps(settings, 3)
    tokens = tokens_of(settings, 2)
    gradient = jax.jit(jax.grad(mean_objective), static_argnums=2)(before.params, tokens, settings)
    gradient = jax.device_get(gradient)
    norm = np.sqrt(sum(np.square(g, dtype=np.float64).sum() for g in jax.tree.leaves(gradient)))
    limit = settings.optimizer.clip_norm
    factor = 1.0 if limit is None else min(1.0, limit / norm)
    assert (factor < 1) == (options is CLIPPED)
    np.testing.assert_allclose(found["clip_factor"], factor, rtol=1e-5)
    if settings.optimizer.name == "adafactor":
        second = after.optimizer["second_moment"].v
        normal = jax.tree.map(lambda g, v: g * factor / np.sqrt(v), gradient, second)
    else:
        moments, o = after.optimizer["moments"], settings.optimizer
        normal = jax.tree.map(
            lambda m, v: (m / (1 - o.beta1**3)) / (np.sqrt(v / (1 - o.beta2**3)) + o.epsilon),
            moments.mu,
            moments.nu,
        )
    update = jax.tree.map(lambda new, old: np.float64(new) - old, after.params, before.params)
    wanted = {
        "gradient_norm": per_group(
            lambda xs: np.sqrt(sum((x**2).sum() for x in xs)), gradient, settings
        ),
        "normalised_gradient_rms": per_group(rms, normal, settings),
        "parameter_rms": per_group(rms, before.params, settings),
        "update_rms": per_group(rms, update, settings),
    }
    names = {"layers", "embedding"} | ({"unembedding"} if "unembedding_VD" in gradient else set())
    # Of the update: parameters near one hold changes of 1e-4 to some 1e-3 of their size.
    tolerance = {"update_rms": 1e-3, "normalised_gradient_rms": 1e-3}
    for vital, by_group in wanted.items():
        assert set(by_group) == names
        for name, value in by_group.items():
            np.testing.assert_allclose(
                found[f"{name}/{vital}"], value, rtol=tolerance.get(vital, 1e-4), err_msg=name
            )
    for name in names:
        np.testing.assert_allclose(
            found[f"{name}/update_ratio"],
            wanted["update_rms"][name] / wanted["parameter_rms"][name],
            rtol=1e-3,
        )
    # Token by token, as often as it stands in the inputs.
    inputs = tokens[:, :-1].ravel().tolist()
    rare = [token for token in range(384) if inputs.count(token) <= vitals.RARE]
    assert 0 < len(rare) < 384 - 10
    rows = gradient["embedding_VD"][rare].astype(np.float64)
    np.testing.assert_allclose(
        found["embedding/rare_rows_gradient_norm"], np.sqrt((rows**2).sum()), rtol=1e-4
    )
    assert found["nonfinite_share"] == 0


def test_a_gradient_that_is_not_finite_has_its_share(small):
    settings = small(**CLIPPED)
    program = program_for(settings)
    state = program.init()
    layers = dict(state.params["layers"])
    layers["w_down_FD"] = layers["w_down_FD"].at[1, 0, 0].set(jnp.inf)
    state = state.replace(params={**state.params, "layers": layers})
    _, found = program.step(state, program.put(tokens_of(settings)), step.controls())
    assert found["nonfinite_share"] > 0.5
    assert not found["applied"]
    assert np.isnan(found["layers/gradient_norm"]).all()
    assert np.isnan(found["max_log_z"])


GRADIENT = {
    "embedding_VD": np.zeros((24, 16), np.float32),
    "layers": {"w_gate_DF": np.ones((3, 16, 8), np.float32)},
}


def shares_of(gradient, policy, data=1, fsdp=1):
    layout = jax.tree_util.tree_map_with_path(sharding.partition_spec, gradient)

    def body(gradient, zero):
        matrices = reductions.MatrixReductions(reductions.Canonical(8), zero)
        return vitals.shares(gradient, policy, matrices)

    mesh = sharding.make_mesh(config.Mesh(data=data, fsdp=fsdp))
    mapped = jax.shard_map(
        body,
        mesh=mesh,
        in_specs=(layout, PartitionSpec()),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    return jax.device_get(jax.jit(mapped)(gradient, jnp.int32(0)))


def test_shares_count_elements():
    gradient = jax.tree.map(np.copy, GRADIENT)
    gradient["embedding_VD"][3, :4] = [np.nan, np.inf, -np.inf, -np.nan]
    # float16 holds 2^-14 with all bits, less with fewer; 1e-40 is below float32's own.
    gradient["embedding_VD"][5, :6] = [2.0**-14, -(2.0**-14), 2.0**-14.5, -1e-7, 1e-40, -1e-30]
    total = 24 * 16 + 3 * 16 * 8
    for mesh in [(1, 1), (1, 8)]:
        found = shares_of(gradient, "float16", *mesh)
        assert found["nonfinite_share"] == np.float32(4) * np.float32(1 / total)
        assert found["underflow_share"] == np.float32(4) * np.float32(1 / total)
    assert set(shares_of(gradient, "bfloat16")) == {"nonfinite_share"}


@pytest.mark.slow
def test_underflow_is_judged_before_the_loss_scale_is_taken_out(small):
    shares = {}
    for scale in (2.0**16, 2.0**-8):
        settings = small(**{"precision.policy": "float16", "precision.loss_scale": scale})
        _, _, found = take_steps(settings, 1)
        shares[scale] = float(found["underflow_share"])
    assert shares[2.0**16] < 0.001
    assert 0.5 < shares[2.0**-8] < 1


# --- no bit of the state, and the same bits on any mesh ---

QUICK = {"numerics.loss_chunk": 4, "model.remat": "full", "precision.policy": "bfloat16"}
SLOW = [
    {"model.remat": "dots", "model.qk_norm": True, "model.tied_embedding": False},
    {"precision.policy": "float16", "optimizer.name": "adamw", "schedule.peak": 0.003},
    {"precision.policy": "float8", "numerics.reduction": "fast", "mesh.fsdp": 2},
    {"mesh.tensor": 2, "mesh.fsdp": 2, "log.microbatch_digests": True},
]


@pytest.mark.parametrize(
    "options", [QUICK, *(pytest.param(o, marks=pytest.mark.slow) for o in SLOW)]
)
def test_no_other_bit_depends_on_whether_vitals_are_measured(small, options):
    _, state, found = take_steps(small(**options), 3)
    _, quiet_state, quiet = take_steps(small(**options, **{"log.vitals": "basic"}), 3)
    assert as_bytes(state) == as_bytes(quiet_state)
    assert as_bytes({name: found[name] for name in quiet}) == as_bytes(quiet)
    more = set(found) - set(quiet)
    assert {"layers/gradient_norm", "max_attention_logit"} <= more
    # What is measured more is what a logbook may lack.
    assert more == {name for name in found if logbook.is_optional(name)} - {"microbatch_digests"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "mesh"),
    [
        ({"model.tied_embedding": False, "model.isolate_documents": True}, (1, 4)),
        ({"mesh.tensor": 2}, (1, 2)),
    ],
)
def test_vitals_have_the_same_bits_on_any_mesh(small, options, mesh):
    # Sequences and heads of more than one block of a vectorised loop.
    shape = {"model.sequence_length": 24, "model.width": 32, "model.head_size": 16}
    _, alone_state, alone = take_steps(small(**shape, **options), 3)
    there = {"mesh.data": mesh[0], "mesh.fsdp": mesh[1]}
    _, state, found = take_steps(small(**shape, **options, **there), 3)
    assert as_bytes(found) == as_bytes(alone)
    assert as_bytes(state) == as_bytes(alone_state)


@pytest.mark.slow
def test_split_models_have_the_vitals_of_the_undivided(small):
    _, _, alone = take_steps(small(), 1)
    _, _, split = take_steps(small(**{"mesh.fsdp": 2, "mesh.tensor": 2}), 1)
    assert set(split) == set(alone)
    for name, value in alone.items():
        np.testing.assert_allclose(split[name], value, rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.mark.parametrize(("data", "fsdp"), [(1, 1), (4, 2)])
def test_the_largest_of_negative_numbers_is_kept(data, fsdp):
    order, width = reductions.Canonical(8), data * fsdp
    terms = -np.random.default_rng(0).uniform(1, 2, (16, 5)).astype(np.float32)

    def body(passes):  # f32[passes, 1, 5], this device's
        found = order.stream(lambda x: reductions.Largest(x[0]), passes, 0)
        return reductions.largest(found.values, sharding.DATA_PARALLEL)

    mapped = jax.shard_map(
        body,
        mesh=sharding.make_mesh(config.Mesh(data=data, fsdp=fsdp)),
        in_specs=PartitionSpec(None, sharding.DATA_PARALLEL),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    terms[9, 2] = np.nan
    found = np.asarray(jax.jit(mapped)(terms.reshape(16 // width, width, 5)))
    np.testing.assert_array_equal(found, terms.max(axis=0))


# --- their cost ---


def test_vitals_add_no_large_array_to_a_step(small):
    """Nothing of the size of all scores [B, H, L, S] is kept, and no product is made twice."""
    counted = {}
    for switch in ("basic", "all"):
        program = program_for(small(**QUICK, **{"log.vitals": switch}))
        take_steps(program.settings, 1)
        (compiled,) = [c.call for c in program.compiled.values()]
        module = modules.read(compiled.as_text())
        dots = sum(
            instruction.opcode == "dot"
            for computation in module.computations.values()
            for instruction in computation.instructions.values()
        )
        counted[switch] = dots, compiled.memory_analysis().temp_size_in_bytes
    # That of the observed queries' logits alone.
    assert counted["all"][0] - counted["basic"][0] == 1
    assert counted["all"][1] < 1.05 * counted["basic"][1]


# --- in a run's logbook ---


def test_records_are_compared_in_the_vitals_that_both_have():
    first = {"loss": 1, "layers/gradient_norm": [1, 2], "clip_factor": 3}
    assert logbook.differing_fields(first, {"loss": 1}) == ()
    assert logbook.differing_fields({"loss": 1}, first) == ()
    other = {"loss": 1, "layers/gradient_norm": [1, 3]}
    assert logbook.differing_fields(first, other) == ("layers/gradient_norm",)
    assert logbook.differing_fields(first, {"clip_factor": 3}) == ("loss",)


@pytest.mark.slow
def test_a_run_may_switch_vitals_on_and_off(small, tmp_path):
    for steps, switch in [(2, "all"), (4, "basic"), (6, "all")]:
        train.train(small(steps=steps, **{"log.vitals": switch}), tmp_path / "run")
    run = RunFolder(tmp_path / "run")
    with Corpus.open(run.config().data.corpus) as corpus:
        assert replaying.replay(run, 0, 6, corpus=corpus).identical
    have = [
        "layers/gradient_norm" in r["bits"]
        for r in logbook.read(tmp_path / "run").records
        if r["event"] == "step"
    ]
    assert have == [True, True, False, False, True, True]
