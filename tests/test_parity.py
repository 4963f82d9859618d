"""The comparison with a CPU before a run's first step: what passes, and what is refused."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import primitives

from palm_jax import doctor, errors, parity, sharding
from palm_jax.parity import Losses, Outcome
from palm_jax.step import make_program

END = 256
MODEL = {"model.width": 32, "model.sequence_length": 64, "model.num_heads": 4}
SPLIT = {"mesh.fsdp": 2, "mesh.tensor": 2, "mesh.emulated_devices": 4}


def rows(settings, seed=0):
    length = settings.model.sequence_length
    tokens = np.random.default_rng(seed).integers(0, 257, (8, length + 1))
    return tokens.astype(np.int32)


def examined(settings, change=lambda params: params):
    """A 2 x 2 mesh stands for an accelerator; the comparison is with one device."""
    program = make_program(settings, sharding.make_mesh(settings.mesh), END)
    return parity.examine(program, change(program.init().params), rows(settings), END)


@pytest.mark.parametrize("policy", ["float32", "bfloat16"])
def test_mesh_and_single_device_agree(small, policy):
    outcome = examined(
        small(
            **MODEL, **SPLIT,
            **{"precision.policy": policy, "numerics.microbatch": 2, "numerics.lanes": 4},
            **{"model.isolate_documents": True, "numerics.loss_chunk": 32},
        )
    )  # fmt: skip
    assert outcome.passes
    assert outcome.sequences == 4
    if policy == "float32":
        assert outcome.difference < 5e-7
    else:  # far enough not to be one computation twice
        assert 1e-6 < outcome.difference < 5e-4
    # A fresh model knows nothing: its loss is above that of guessing.
    assert math.log(257) < outcome.loss < math.log(257) + 2


def test_cpu_computes_the_same_sequences_of_a_deeper_batch(small):
    settings = small(**MODEL, **{"mesh.data": 2, "mesh.fsdp": 2, "numerics.lanes": 8})
    program = make_program(settings, sharding.make_mesh(settings.mesh), END)
    params, tokens = program.init().params, rows(settings)
    there = parity.losses(program, params, tokens)
    here = parity.losses_on_cpu(settings, tokens[:4], END)
    assert parity.largest_difference(there, here) < 5e-7
    # Sequences in another order are no longer the same ones.
    shuffled = parity.losses_on_cpu(settings, tokens[[1, 0, 2, 3]], END)
    assert parity.largest_difference(there, shuffled) > 1e-3


@pytest.fixture
def cut_products(monkeypatch):
    """Matrix products whose float32 factors are cut to some bits of mantissa, while tracing."""
    bind = primitives.dot_general_p.bind

    def cut_to(bits):
        def cut(x):
            return jax.lax.reduce_precision(x, 8, bits) if x.dtype == jnp.float32 else x

        monkeypatch.setattr(
            primitives.dot_general_p, "bind", lambda a, b, **rest: bind(cut(a), cut(b), **rest)
        )
        jax.clear_caches()  # JAX keeps traces of its own functions

    yield cut_to
    monkeypatch.undo()
    jax.clear_caches()


@pytest.mark.parametrize(
    ("bits", "passes"),
    [
        (7, False),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in [(10, False), (15, True)]),
    ],
)
def test_products_in_bfloat16_or_tensorfloat_are_refused(small, cut_products, bits, passes):
    settings = small(**MODEL, **SPLIT)
    honest = parity.losses_on_cpu(settings, rows(settings)[:4], END)
    program = make_program(settings, sharding.make_mesh(settings.mesh), END)
    params = program.init().params
    cut_products(bits)
    cut = parity.losses(program, params, rows(settings))
    difference = parity.largest_difference(cut, honest)
    assert (difference <= parity.TOLERANCE["float32"]) is passes
    assert difference > 1e-7


def without_a_slice(params):
    """As if one device had not received its part of a matrix."""
    w = params["layers"]["w_down_FD"]
    return {**params, "layers": {**params["layers"], "w_down_FD": w.at[:, ::2].set(0)}}


@pytest.mark.slow
def test_gross_fault_is_refused_in_bfloat16_too(small):
    outcome = examined(small(**MODEL, **SPLIT, **{"precision.policy": "bfloat16"}), without_a_slice)
    assert not outcome.passes


def test_numbers_that_are_not_finite_do_not_pass():
    good, bad = np.ones(4), np.array([1, np.nan, 1, 1])
    assert math.isnan(parity.largest_difference(Losses(bad, good), Losses(good, good)))
    assert not dataclasses.replace(OUTCOME, difference=math.nan).passes
    assert dataclasses.replace(OUTCOME, difference=2e-6).passes


def test_largest_difference_is_that_of_any_number():
    here = Losses(np.array([5.0, 6.0]), np.array([-2.0, 4.0]))
    there = Losses(np.array([5.0, 6.0 + 6e-6]), np.array([-2.0 + 4e-6, 4.0]))
    assert parity.largest_difference(there, here) == pytest.approx(2e-6)


OUTCOME = Outcome(
    platform="tpu", sequences=4, loss=5.5504, loss_on_cpu=5.5501, difference=6e-5, tolerance=2e-6
)


class Accelerator:
    """The devices of a mesh, under another name."""

    def __init__(self, mesh):
        class Device:
            platform = "tpu"

        self.devices = np.array([Device()] * mesh.size)


def on_an_accelerator(settings, monkeypatch, answer):
    program = make_program(settings, sharding.make_mesh(settings.mesh), END)
    monkeypatch.setattr(parity, "examine", lambda *given: answer)
    fake = dataclasses.replace(program, mesh=Accelerator(program.mesh))
    return parity.check(fake, None, None, END)


def test_run_on_a_cpu_is_compared_with_nothing(small):
    settings = small()
    program = make_program(settings, sharding.make_mesh(settings.mesh), END)
    assert parity.check(program, None, None, END) is None


def test_run_is_refused_with_both_losses_and_a_remedy(small, monkeypatch):
    with pytest.raises(errors.CannotDo) as caught:
        on_an_accelerator(small(), monkeypatch, OUTCOME)
    for expected in ("tpu", "5.5504", "5.5501", "6e-05", "2e-06", "MATMUL_PRECISION=highest"):
        assert expected in str(caught.value)
    with jax.default_matmul_precision("highest"):
        assert "XLA_FLAGS" in parity.refusal(OUTCOME, "float32")
    assert "XLA_FLAGS" in parity.refusal(OUTCOME, "bfloat16")


def test_logbook_gets_what_was_compared_or_why_not(small, monkeypatch):
    close = dataclasses.replace(OUTCOME, difference=1e-7)
    assert on_an_accelerator(small(), monkeypatch, close) == dataclasses.asdict(close)
    assert on_an_accelerator(small(), monkeypatch, "no room") == {
        "platform": "tpu",
        "left_out": "no room",
    }


def test_what_a_host_cannot_compute_is_left_out_and_said(small, monkeypatch):
    assert parity.left_out(small()) is None
    large = small(**{"model.num_layers": 64, "model.width": 4096, "model.feed_forward": 16384})
    assert "2,000,000,000" in parity.left_out(large)
    monkeypatch.setattr(doctor, "host_memory", lambda: (2**30, 2**10))
    assert examined(small(**MODEL, **SPLIT)).endswith("0.0 GiB available")
    monkeypatch.undo()

    def no_cpu(backend):
        raise RuntimeError("Unknown backend cpu")

    monkeypatch.setattr(jax, "local_devices", no_cpu)
    assert "JAX_PLATFORMS=tpu,cpu" in parity.left_out(small())
