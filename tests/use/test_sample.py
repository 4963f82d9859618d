"""Drawing tokens, against loops and against what probabilities say."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from palm_jax.attention import MASKED
from palm_jax.errors import WrongInput
from palm_jax.use import sample

WORDS, PADDED, NUM = 11, 16, 40_000
LOGITS_V = np.r_[np.random.default_rng(1).normal(size=WORDS) * 2, [MASKED] * (PADDED - WORDS)]

FLAT_V = np.r_[np.zeros(WORDS), [MASKED] * (PADDED - WORDS)]


@functools.partial(jax.jit, static_argnames=("is_greedy", "is_filtered"))
def compiled(logits_BV, rows_B, positions_B, draw, *, is_greedy, is_filtered):
    how = {"is_greedy": is_greedy, "is_filtered": is_filtered}
    return sample.tokens(logits_BV, rows_B, positions_B, draw, **how)


def drawn(logits_V: Any, position: int = 3, **sampling: Any) -> np.ndarray:
    """A token for each of many rows with these logits."""
    how = sample.Sampling(**sampling)
    sample.check(how)
    logits_BV = np.broadcast_to(np.asarray(logits_V, np.float32), (NUM, PADDED))
    positions_B = np.full(NUM, position, np.int32)
    draw = sample.draw_of(how, WORDS)
    flags = {"is_greedy": how.is_greedy, "is_filtered": how.is_filtered}
    return np.asarray(compiled(logits_BV, np.arange(NUM), positions_B, draw, **flags))


def softmax(logits_V: np.ndarray) -> np.ndarray:
    weights_V = np.exp(logits_V - logits_V.max())
    return weights_V / weights_V.sum()


def kept_by_a_loop(logits_V: np.ndarray, top_k: int, top_p: float) -> set[int]:
    """The likeliest tokens, one by one, until there are k or they have p of what k leaves."""
    order = sorted(range(len(logits_V)), key=lambda token: (-logits_V[token], token))[:top_k]
    probabilities = softmax(logits_V[order])
    kept, together = set(), 0.0
    for token, probability in zip(order, probabilities, strict=True):
        kept.add(token)
        together += probability
        if together >= top_p:
            break
    return kept


def test_temperature_0_is_the_likeliest_token():
    assert set(drawn(LOGITS_V, temperature=0.0)) == {int(LOGITS_V.argmax())}
    assert set(drawn(LOGITS_V, temperature=0.0, top_k=3, top_p=0.1)) == {int(LOGITS_V.argmax())}


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 1e-45])
def test_a_tiny_temperature_is_the_likeliest_token_and_no_division_by_zero(temperature):
    assert set(drawn(LOGITS_V, temperature=temperature)) == {int(LOGITS_V.argmax())}


def test_top_k_above_the_vocabulary_is_all_words():
    everything = drawn(LOGITS_V)
    assert len(set(everything)) == WORDS
    for top_k in (WORDS, WORDS + 1, 10**9):
        assert drawn(LOGITS_V, top_k=top_k).tobytes() == everything.tobytes()
    assert drawn(LOGITS_V, top_p=1.0).tobytes() == everything.tobytes()


def test_padding_of_the_vocabulary_is_never_drawn():
    found = drawn(FLAT_V, temperature=1e30)
    assert set(found) == set(range(WORDS))
    filtered = drawn(LOGITS_V, temperature=1e30, top_p=0.999999)
    assert max(filtered) < WORDS


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_are_those_of_the_softmax_of_tempered_scores(temperature):
    counts = np.bincount(drawn(LOGITS_V, temperature=temperature), minlength=WORDS)
    expected = softmax(LOGITS_V[:WORDS] / temperature)
    deviation = np.sqrt(NUM * expected * (1 - expected))
    # 33 comparisons: five standard deviations happen once in 50,000 seeds.
    assert (np.abs(counts - NUM * expected) < 5 * deviation + 1).all()


@given(
    st.lists(st.integers(-6, 6), min_size=WORDS, max_size=WORDS),
    st.integers(1, WORDS + 2),
    st.floats(0.01, 0.99),
)
def test_filters_keep_what_a_loop_keeps(values, top_k, top_p):
    """Integers: equal scores are frequent, and of those the first ids count as likelier."""
    logits_V = np.asarray(values, np.float64)
    padded_V = np.r_[logits_V, [MASKED] * (PADDED - WORDS)].astype(np.float32)[None]
    # Not where the sum of probabilities meets the threshold within float32.
    sums = np.cumsum(np.sort(softmax(np.sort(logits_V)[::-1][:top_k]))[::-1])
    top_p = top_p + 1e-4 * bool((np.abs(sums - top_p) < 1e-5).any())
    scores_V = np.where(padded_V <= MASKED, -np.inf, padded_V - padded_V.max())
    found_V = sample._kept(scores_V, jnp.int32(min(top_k, WORDS)), jnp.float32(top_p))[0]
    assert set(np.flatnonzero(found_V)) == kept_by_a_loop(logits_V, top_k, top_p)


def test_what_is_drawn_is_among_what_is_kept():
    found = set(drawn(LOGITS_V, top_k=6, top_p=0.8))
    assert found == kept_by_a_loop(LOGITS_V[:WORDS], 6, 0.8)


def test_noise_is_of_seed_row_and_position():
    first = drawn(FLAT_V, seed=1)
    assert (drawn(FLAT_V, seed=1) == first).all()
    # Independent draws of 11 words agree once in 11 times; 0.0014 is one standard deviation.
    later = drawn(FLAT_V, seed=1, position=4)
    others = (drawn(FLAT_V, seed=2), later, np.roll(later, 1), np.roll(first, 1))
    for other in others:
        assert (other == first).mean() == pytest.approx(1 / WORDS, abs=0.008)


@pytest.mark.parametrize(
    ("sampling", "told"),
    [
        ({"temperature": -0.1}, "--temperature -0.1"),
        ({"temperature": float("nan")}, "--temperature nan"),
        ({"temperature": float("inf")}, "--temperature inf"),
        ({"top_k": 0}, "--top-k 0"),
        ({"top_p": 0.0}, "--top-p 0 "),
        ({"top_p": 1.5}, "--top-p 1.5"),
        ({"top_p": float("nan")}, "--top-p nan"),
        ({"seed": -1}, "--seed -1"),
        ({"seed": 2**32}, "--seed 4294967296"),
    ],
)
def test_numbers_that_say_nothing_are_refused(sampling, told):
    with pytest.raises(WrongInput, match=told):
        sample.check(sample.Sampling(**sampling))
