"""What the model's switches do in whole steps: meshes, dropout, initial values, widths."""

from __future__ import annotations

import functools
from typing import Any

import formulas
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from runs import StopAfter

from palm_jax import attention, config, model, sharding, step
from palm_jax import train as training
from palm_jax.corpus.reader import Corpus
from palm_jax.decoder import dropout, initial, positions
from palm_jax.decoder.split import UNDIVIDED
from palm_jax.errors import WrongInput
from palm_jax.record.folder import RunFolder
from palm_jax.replay import replay as replaying

# Together they have every switch.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "opt": {
        "block": "serial",
        "norm": "layernorm",
        "final_norm_scale": True,
        "biases": True,
        "num_key_value_heads": 2,
        "activation": "relu",
        "positions": "learned",
        "logit_scale": 1.0,
        "initialiser": "gpt2",
        "dropout": 0.1,
        "attention_dropout": 0.1,
    },
    "bloom": {
        "num_heads": 6,
        "num_key_value_heads": 2,
        "head_size": 4,
        "block": "serial",
        "norm": "layernorm",
        "biases": True,
        "final_norm_scale": True,
        "activation": "gelu",
        "positions": "alibi",
        "embedding_norm": True,
        "embedding_dropout": 0.2,
        "initialiser": "bloom",
        "isolate_documents": True,
    },
    "deepnorm": {
        "block": "deepnorm",
        "num_key_value_heads": 2,
        "activation": "geglu",
        "positions": "none",
        "embedding_scale": 4.0,
        "initialiser": "deepnorm",
        "qk_norm": True,
        "tied_embedding": False,
        "dropout": 0.3,
    },
}
STEPS = 3


def settings_of(small, name: str, mesh=(1, 1, 1), **overrides) -> config.Config:
    switches = {f"model.{key}": value for key, value in ARCHITECTURES[name].items()}
    sizes = dict(zip(("mesh.data", "mesh.fsdp", "mesh.tensor"), mesh, strict=True))
    common = {"data.ramp": {"sizes": [8]}, "model.num_heads": 2, "log.vitals": "all"}
    return small(**common | switches | sizes | overrides)


def run_steps(settings: config.Config, num_steps: int = STEPS) -> tuple[Any, list[Any]]:
    program = step.make_program(settings, sharding.make_mesh(settings.mesh), 256)
    state, vitals = program.init(), []
    for index in range(num_steps):
        shape = (8, settings.model.sequence_length + 1)
        tokens = np.random.default_rng((7, index)).integers(0, 257, shape).astype(np.int32)
        state, v = program.step(state, program.put(tokens), step.controls())
        vitals.append(v)
    return jax.device_get(state), jax.device_get(vitals)


def as_bytes(tree: Any) -> dict[str, bytes]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): np.asarray(leaf).tobytes() for path, leaf in leaves}


@pytest.fixture(scope="module")
def on_one_device(small):
    """State and vitals on one device, by architecture."""
    return functools.cache(lambda name: run_steps(settings_of(small, name)))


# --- on meshes ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("opt", (2, 2, 1)),
        pytest.param("bloom", (1, 8, 1), marks=pytest.mark.slow),
        pytest.param("deepnorm", (2, 2, 1), marks=pytest.mark.slow),
    ],
)
def test_every_architecture_has_the_same_bits_on_any_mesh(small, on_one_device, name, mesh):
    wanted_state, wanted_vitals = on_one_device(name)
    state, vitals = run_steps(settings_of(small, name, mesh))
    assert as_bytes(vitals) == as_bytes(wanted_vitals)
    assert as_bytes(state) == as_bytes(wanted_state)


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_splits_over_tensor(small, on_one_device, name):
    """Every norm and update, not the loss alone, so that no gradient is lost or counted twice."""
    _, (wanted, *_) = on_one_device(name)
    _, (found,) = run_steps(settings_of(small, name, (1, 2, 2)), 1)
    assert found.keys() == wanted.keys()
    for key in wanted:
        if np.issubdtype(np.asarray(wanted[key]).dtype, np.floating):
            # Other orders of sums, in float32.
            np.testing.assert_allclose(found[key], wanted[key], rtol=2e-4, err_msg=key)


@pytest.mark.slow
def test_dropout_and_eight_bits_resume_and_replay(small, tmp_path):
    settings = settings_of(small, "opt", **{"precision.policy": "float8", "checkpoint.every": 2})
    settings = settings.model_copy(update={"steps": 5})
    straight = training.train(settings, tmp_path / "straight")
    training.train(settings, tmp_path / "run", stop_requested=StopAfter(1))
    resumed = training.train(settings, tmp_path / "run")
    assert resumed.state_digest == straight.state_digest
    run = RunFolder(tmp_path / "run")
    with Corpus.open(settings.data.corpus) as corpus:
        assert replaying.replay(run, 1, 5, corpus=corpus).identical


# --- ALiBi --------------------------------------------------------------------------------


def test_alibi_slopes_of_8_12_and_112_heads():
    np.testing.assert_array_equal(positions.alibi_slopes(8), [2.0**-i for i in range(1, 9)])
    twelve = positions.alibi_slopes(12)
    np.testing.assert_array_equal(twelve[:8], positions.alibi_slopes(8))
    assert twelve[8:] == pytest.approx([0.707107, 0.353553, 0.176777, 0.0883883], rel=1e-5)
    many = positions.alibi_slopes(112)
    assert len(many) == 112
    assert many[[0, 63, 64, 111]] == pytest.approx(
        [0.917004, 0.00390625, 0.957603, 0.0163168], rel=1e-5
    )


@given(num_heads=st.integers(1, 200))
def test_alibi_slopes_are_those_of_its_authors_code(num_heads):
    np.testing.assert_allclose(
        positions.alibi_slopes(num_heads), formulas.slopes(num_heads), rtol=1e-6
    )


# --- normalised queries and keys ----------------------------------------------------------


def test_normalised_queries_and_keys_bound_the_logits():
    """By sqrt(K), by which their scales may multiply it (Wortsman et al., 2023, section 3.1.1)."""
    ids_BL = np.arange(16).reshape(2, 8)
    largest = {}
    for qk_norm in (True, False):
        m = model_of(num_layers=2, qk_norm=qk_norm, num_key_value_heads=4)
        params = model.init(jax.random.key(0), m)
        layers = params["layers"]
        layers = layers | {n: 1000 * layers[n] for n in ("w_query_DHK", "w_key_DGK")}
        _, seen = model.observed_hidden(
            params | {"layers": layers}, ids_BL, settings=m, dtype=jnp.float32
        )
        largest[qk_norm] = float(jnp.max(seen.attention.largest_logit))
    assert 1 < largest[True] <= 32**0.5 * (1 + 1e-6)
    assert largest[False] > 1e5


# --- dropout ------------------------------------------------------------------------------


def test_dropout_drops_its_share_and_keeps_the_mean():
    x_BLd = jnp.ones((4, 64, 64))
    key = jax.random.key(3)
    found = np.asarray(dropout.dropped(x_BLd, 0.2, key, dropout.ATTENTION, UNDIVIDED))
    assert set(np.unique(found)) == {0.0, np.float32(1 / 0.8)}
    # 16,384 draws: a standard deviation of 0.0031.
    assert (found == 0).mean() == pytest.approx(0.2, abs=0.015)
    other = np.asarray(dropout.dropped(x_BLd, 0.2, key, dropout.FEED_FORWARD, UNDIVIDED))
    assert ((found == 0) & (other == 0)).mean() == pytest.approx(0.04, abs=0.01)
    assert dropout.dropped(x_BLd, 0.2, None, 0, UNDIVIDED) is x_BLd


def test_dropped_weights_belong_to_the_head_and_not_to_the_device():
    key = jax.random.key(0)
    kept = dropout.kept_weights((2, 5, 5), jnp.arange(4), 0.5, key)
    later = dropout.kept_weights((2, 5, 5), jnp.arange(2, 4), 0.5, key)
    assert kept.shape == (2, 4, 5, 5)
    assert np.asarray(kept)[:, 2:].tobytes() == np.asarray(later).tobytes()
    assert (np.asarray(kept)[:, 0] != np.asarray(kept)[:, 1]).any()


def test_dropout_of_weights_multiplies_them_after_the_softmax():
    rng = np.random.default_rng(0)
    query, key, value = (
        rng.normal(size=s).astype(np.float32) for s in [(1, 4, 2, 3)] + [(1, 4, 3)] * 2
    )
    kept = rng.integers(0, 2, (1, 2, 4, 4)) * 2.0
    given_ = attention.Given(kept_BHLS=jnp.asarray(kept, jnp.float32))
    found = attention.attention(*map(jnp.asarray, (query, key, value)), given_, kind="xla")
    for head in range(2):
        scores = np.where(np.tril(np.ones((4, 4))), query[0, :, head] @ key[0].T, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights = weights / weights.sum(-1, keepdims=True) * kept[0, head]
        np.testing.assert_allclose(found[0, :, head], weights @ value[0], atol=1e-5)


def test_dropout_differs_by_step_and_seed_and_leaves_evaluations_alone(small):
    """One batch at a rate so small that parameters do not move: the loss moves by dropout alone."""
    changes = {"schedule.peak": 1e-30, "optimizer": {"name": "adafactor"}}

    def losses(**more):
        program_settings = settings_of(small, "opt", **changes, **more)
        program = step.make_program(
            program_settings, sharding.make_mesh(program_settings.mesh), 256
        )
        state, found = program.init(), []
        shape = (8, program_settings.model.sequence_length + 1)
        tokens = np.random.default_rng(0).integers(0, 257, shape).astype(np.int32)
        batch = program.put(tokens)
        held_out = program.losses(state.params, batch, np.ones(batch.shape[:3], np.bool_))
        for _ in range(3):
            state, vitals = program.step(state, batch, step.controls())
            found.append(float(vitals["cross_entropy"]))
        again = program.losses(state.params, batch, np.ones(batch.shape[:3], np.bool_))
        assert as_bytes(again) == as_bytes(held_out)
        mean = float(np.sum(held_out.cross_entropy) / np.sum(held_out.targets))
        return found, mean

    found, held_out = losses()
    assert len({*found, held_out}) == 4
    assert losses()[0] == found
    without, _ = losses(**{"model.dropout": 0.0, "model.attention_dropout": 0.0})
    assert without == pytest.approx([held_out] * 3, rel=1e-6)


# --- initial values -----------------------------------------------------------------------


def model_of(**changes: Any) -> config.Model:
    return config.Model(
        **{
            "num_layers": 8,
            "width": 192,
            "num_heads": 4,
            "head_size": 32,
            "vocabulary_size": 500,
            "sequence_length": 8,
        }
        | changes
    )


@pytest.mark.parametrize(
    ("changes", "query", "up", "down", "table"),
    [
        ({}, 192**-0.5, 192**-0.5, 768**-0.5, 1.0),
        ({"initialiser": "gpt2"}, 0.02, 0.02, 0.005, 0.02),
        ({"initialiser": "gpt2", "initial_std": 0.006}, 0.006, 0.006, 0.0015, 0.006),
        ({"initialiser": "bloom"}, 576**-0.5, 576**-0.5, 576**-0.5 / 4, 576**-0.5),
        ({"initialiser": "small"}, 480**-0.5, 480**-0.5, 480**-0.5, 480**-0.5),
        ({"initialiser": "wortsman"}, 192**-0.5, 192**-0.5, 768**-0.5, 192**-0.5),
        (
            {"initialiser": "deepnorm", "block": "deepnorm"},
            (2 / 320) ** 0.5,
            (2 / 960) ** 0.5 / 64**0.25,
            (2 / 960) ** 0.5 / 64**0.25,
            192**-0.5,
        ),
        ({"embedding_std": 0.5}, 192**-0.5, 192**-0.5, 768**-0.5, 0.5),
        # Twice the base's width: variances of fixed ones halve, tables stay.
        (
            {"initialiser": "gpt2", "mup_base_width": 96},
            0.02 / 2**0.5,
            0.02 / 2**0.5,
            0.005 / 2**0.5,
            0.02,
        ),
        (
            {"initialiser": "wortsman", "mup_base_width": 48},
            192**-0.5,
            192**-0.5,
            768**-0.5,
            48**-0.5,
        ),
    ],
)
def test_initial_values_have_the_deviations_of_the_table(changes, query, up, down, table):
    params = model.init(jax.random.key(1), model_of(**changes))
    layers = params["layers"]
    found = [
        float(np.std(x))
        for x in (
            layers["w_query_DHK"],
            layers["w_up_DF"],
            layers["w_down_FD"],
            params["embedding_VD"],
        )
    ]
    # 96,000 numbers and more: a standard deviation of 0.23%.
    assert found == pytest.approx([query, up, down, table], rel=0.012)
    largest = float(np.abs(layers["w_up_DF"]).max()) / up
    if changes.get("initialiser") == "wortsman":
        assert largest == pytest.approx(2 / 0.8796, abs=1e-3)  # two deviations before truncation
    else:
        assert largest > 4


def test_deepnorm_numbers_of_12_and_100_layers():
    for num_layers, alpha, beta in [(12, 2.21336, 0.319472), (100, 3.76060, 0.188030)]:
        assert initial.deepnorm_alpha(num_layers) == pytest.approx(alpha, rel=1e-5)
        assert initial.deepnorm_beta(num_layers) == pytest.approx(beta, rel=1e-5)


def test_published_initial_deviations():
    """BLOOM-176B's 0.0048 and OPT-175B's output kernels."""
    sizes = {"num_heads": 112, "head_size": 128, "num_layers": 70, "width": 14336}
    bloom = model_of(**sizes, initialiser="bloom")
    assert initial.kernel_std(bloom, "query", 14336, 14336) == pytest.approx(0.00482198, rel=1e-5)
    opt = model_of(num_layers=96, width=12288, initialiser="gpt2", initial_std=0.006)
    assert initial.kernel_std(opt, "down", 49152, 12288) == pytest.approx(4.3301e-4, rel=1e-4)


# --- what does not fit together -----------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"num_heads": 6, "num_key_value_heads": 4},
            "num_key_value_heads=4 must divide num_heads=6",
        ),
        ({"num_heads": 2, "head_size": 5}, "must be even"),
        (
            {"attention": "splash", "positions": "alibi"},
            "attention=splash: the kernel adds nothing",
        ),
        ({"attention": "splash", "attention_dropout": 0.1}, "the kernel drops no weights"),
        ({"block": "deepnorm", "final_norm_scale": True}, "final_norm_scale=true"),
        ({"initialiser": "deepnorm"}, "initialiser=deepnorm belongs to block=deepnorm"),
        ({"initial_std": 0.01}, "initial_std=0.01: initialiser=palm"),
        ({"mup_base_head_size": 4}, "mup_base_head_size=4 needs mup_base_width"),
        ({"mup_base_width": 16}, "optimizer.name=adafactor"),
        ({"dropout": 1.0}, "model.dropout=1.0"),
        ({"activation": "swish"}, "model.activation="),
    ],
)
def test_switches_that_do_not_fit_together_are_refused(small, changes, told):
    with pytest.raises(WrongInput, match=told):
        small(**{f"model.{key}": value for key, value in changes.items()})


def test_odd_heads_are_refused_only_where_pairs_are_turned(small):
    assert small(**{"model.head_size": 5, "model.positions": "alibi"}).model.head_size == 5


def test_keys_that_tensor_parallel_devices_cannot_share_out_are_refused(small):
    grouped = {"model.num_heads": 8, "model.num_key_value_heads": 2, "mesh.tensor": 4}
    with pytest.raises(
        WrongInput, match=r"num_key_value_heads = 2 does not divide by mesh\.tensor=4"
    ):
        small(**grouped)


# --- maximal update parametrisation -------------------------------------------------------


def activation_sizes(small, width: int, mup: bool) -> dict[str, float]:
    """Root mean squares after a few steps at a rate high enough to change them."""
    changes = {
        "model.width": width,
        "model.num_heads": width // 8,
        "model.head_size": 8,
        "model.num_key_value_heads": width // 8,
        "model.num_layers": 2,
        "optimizer": {"name": "adamw", "weight_decay": 0.0, "clip_norm": None},
        "schedule": {"kind": "constant", "peak": 0.02},
        "data.ramp": {"sizes": [8]},
        "log.vitals": "all",
    }
    if mup:
        changes |= {"model.mup_base_width": 32}
    settings = small(**changes)
    program = step.make_program(settings, sharding.make_mesh(settings.mesh), 256)
    state = program.init()
    tokens = np.random.default_rng(0).integers(0, 257, (8, settings.model.sequence_length + 1))
    batch = program.put(tokens.astype(np.int32))
    before, vitals = None, None
    for _ in range(5):
        state, vitals = program.step(state, batch, step.controls())
        before = before or jax.device_get(vitals)
    after = jax.device_get(vitals)
    return {
        "residual": float(after["layers/residual_rms"][-1]),
        "branches": float(np.mean(after["layers/branch_ratio"])),
        "log_z": abs(float(after["mean_log_z"] - before["mean_log_z"])),
    }


@pytest.mark.slow
def test_sizes_of_activations_do_not_depend_on_width_under_mup(small):
    """The coordinate check of Tensor Programs V (appendix D.1), at an eightfold width."""
    narrow, wide = (activation_sizes(small, width, mup=True) for width in (32, 256))
    standard_narrow, standard_wide = (
        activation_sizes(small, width, mup=False) for width in (32, 256)
    )
    for key in ("residual", "branches"):
        growth = wide[key] / narrow[key]
        without = standard_wide[key] / standard_narrow[key]
        assert growth < 1.6, (key, growth, without)
        assert without > 1.6 * growth, (key, growth, without)
