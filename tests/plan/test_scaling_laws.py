"""Published laws: their printed figures, and optima against a search."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from palm_jax.errors import WrongInput
from palm_jax.plan import scaling_laws
from palm_jax.plan.scaling_laws import CHINCHILLA


@pytest.mark.parametrize(
    ("name", "parameters", "tokens", "exponent"),
    [
        ("printed", 3.219e10, 2.982e12, 0.4516),
        ("unrounded", 4.036e10, 2.379e12, 0.4565),
        ("refitted", 7.225e10, 1.329e12, 0.5126),
    ],
)
def test_optimum_of_gophers_budget(name, parameters, tokens, exponent):
    law = CHINCHILLA[name]
    best = law.optimum(5.76e23)
    assert best.parameters == pytest.approx(parameters, rel=5e-4)
    assert best.tokens == pytest.approx(tokens, rel=5e-4)
    assert law.parameter_exponent == pytest.approx(exponent, abs=5e-5)


def test_the_refit_has_about_eighteen_tokens_a_parameter():
    assert CHINCHILLA["refitted"].optimum(5.76e23).tokens_per_parameter == pytest.approx(
        18.4, abs=0.05
    )


def test_losses_of_chinchilla_and_gopher():
    printed, refitted = CHINCHILLA["printed"], CHINCHILLA["refitted"]
    assert printed.loss(70e9, 1.4e12) == pytest.approx(1.93665, abs=5e-6)
    assert refitted.loss(70e9, 1.4e12) == pytest.approx(1.97388, abs=1e-5)
    assert printed.loss(280e9, 300e9) == pytest.approx(1.99326, abs=5e-6)


def test_more_data_helps_less_under_the_refit():
    # DeepSeek-V3's 37B active parameters, 5.5T against 8T tokens.
    gaps = {
        name: law.B / 5.5e12**law.beta - law.B / 8e12**law.beta for name, law in CHINCHILLA.items()
    }
    assert gaps["printed"] == pytest.approx(0.0111, abs=5e-5)
    assert gaps["refitted"] == pytest.approx(0.0058, abs=5e-5)


def test_kaplan():
    assert scaling_laws.KAPLAN.loss(175e9, 300e9) == pytest.approx(1.66096, abs=5e-6)
    assert scaling_laws.critical_batch(3) == pytest.approx(1.069e6, rel=5e-4)


@given(name=st.sampled_from(sorted(CHINCHILLA)), log_flops=st.floats(17, 27))
def test_no_size_on_a_grid_beats_the_optimum(name, log_flops):
    law, flops = CHINCHILLA[name], 10.0**log_flops
    best = law.optimum(flops)
    sizes = best.parameters * np.exp(np.linspace(-2, 2, 401))
    losses = law.E + law.A / sizes**law.alpha + law.B / (flops / 6 / sizes) ** law.beta
    # The middle of the grid is the optimum itself.
    assert np.argmin(losses) == 200
    assert best.loss_nats == pytest.approx(losses[200], rel=1e-12)
    assert 6 * best.parameters * best.tokens == pytest.approx(flops, rel=1e-12)


@given(log_flops=st.floats(17, 27))
def test_no_size_on_a_grid_beats_kaplans_optimum(log_flops):
    flops = 10.0**log_flops
    best = scaling_laws.KAPLAN.optimum(flops)
    losses = [
        scaling_laws.KAPLAN.loss(size, flops / 6 / size)
        for size in best.parameters * np.exp(np.linspace(-2, 2, 401))
    ]
    assert np.argmin(losses) == 200


@pytest.mark.parametrize("name", sorted(CHINCHILLA))
@pytest.mark.parametrize("tokens_read", [0.0, 1e12, 1e14])
def test_optimum_with_inference_is_the_cheapest_on_a_grid(name, tokens_read):
    law = CHINCHILLA[name]
    loss = law.optimum(5.76e23).loss_nats
    found = law.optimum_with_inference(loss, tokens_read)
    assert law.loss(found.parameters, found.tokens) == pytest.approx(loss, rel=1e-12)

    def cost(size):
        return size * (6 * law.tokens_for(loss, size) + 2 * tokens_read)

    sizes = found.parameters * np.exp(np.linspace(-1, 1, 2001))
    costs = [cost(size) for size in sizes]
    # A bounded search stops near the bottom of the valley, where it is flat.
    assert cost(found.parameters) <= min(costs) * (1 + 1e-9)


def test_reading_much_wants_a_smaller_model_that_trains_longer():
    law = CHINCHILLA["refitted"]
    best = law.optimum(5.76e23)
    used = law.optimum_with_inference(best.loss_nats, 1e13)
    assert used.parameters < best.parameters
    assert used.tokens > best.tokens


def test_no_tokens_are_enough_below_what_a_size_can_reach():
    law = CHINCHILLA["printed"]
    floor = law.E + law.A / 1e9**law.alpha
    assert law.tokens_for(floor - 1e-9, 1e9) == math.inf
    assert law.tokens_for(floor + 0.1, 1e9) < math.inf
    with pytest.raises(WrongInput, match=r"ends at 1\.69"):
        law.optimum_with_inference(1.69, 1e12)
