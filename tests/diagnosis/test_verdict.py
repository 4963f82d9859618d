"""Votes against counting by hand, and a verdict for every cause."""

from __future__ import annotations

import itertools
import math

import hypothesis
import hypothesis.strategies as st
import pytest

from palm_jax.diagnosis.verdict import Replays, verdict
from palm_jax.diagnosis.votes import CHANCE, Votes

ALL, NONE, SOME = Votes(4, 4), Votes(0, 4), Votes(2, 4)
SPIKED = Replays(None, None, hurt=True)


# --- votes ---


@pytest.mark.parametrize(
    ("more", "fewer"), list(itertools.permutations([ALL, NONE, SOME, Votes(1, 8)], 2))
)
def test_two_arms_differ_if_so_few_tables_are_as_uneven(more, fewer):
    """Fisher's test, by dealing the spikes out to all replicates in every way."""
    spiked, of = more.spiked + fewer.spiked, more.of + fewer.of
    as_uneven = sum(
        math.comb(more.of, k) * math.comb(fewer.of, spiked - k)
        for k in range(more.spiked, min(spiked, more.of) + 1)
    )
    assert more.clearly_above(fewer) == (as_uneven / math.comb(of, spiked) < CHANCE)


def test_four_of_four_against_none_of_four_is_enough_and_three_are_not():
    assert ALL.clearly_above(NONE)
    assert not Votes(3, 4).clearly_above(NONE)
    assert not Votes(3, 3).clearly_above(Votes(0, 3))
    assert not ALL.clearly_above(ALL)


def test_interval_is_where_the_tails_have_their_share():
    low, high = Votes(2, 5).interval()

    def tail(share: float, counts: range) -> float:
        return sum(math.comb(5, k) * share**k * (1 - share) ** (5 - k) for k in counts)

    assert tail(low, range(2, 6)) == pytest.approx(0.025)
    assert tail(high, range(3)) == pytest.approx(0.025)
    assert Votes(0, 0).interval() == (0.0, 1.0)
    assert str(NONE) == "0 of 4 (0% to 60%)"


def test_an_arm_that_was_not_run_says_nothing():
    nothing = Votes(0, 0)
    assert not nothing.is_calm()
    assert not nothing.spikes()
    assert not ALL.clearly_above(nothing)


# --- verdicts ---

CASES = {
    "chance": {"N": NONE},
    "recipe": {"N": ALL, "C": ALL, "E": ALL, "half rate": NONE},
    "state": {"N": ALL, "C": ALL, "E": NONE},
    "data": {"N": ALL, "C": NONE, "B": ALL},
    "combination": {"N": ALL, "C": NONE, "B": NONE, "E": NONE},
}


@pytest.mark.parametrize("cause", CASES)
def test_every_cause_has_its_votes(cause):
    found = verdict(SPIKED, CASES[cause])
    assert found.cause == cause
    assert found.next_arms == ()


def test_replays_come_before_all_votes():
    votes = CASES["data"]
    differ, wrong = "step 4, loss", "step 5, gradient_norm"
    assert verdict(Replays(differ, wrong, hurt=True), votes).cause == "nondeterministic"
    assert verdict(Replays(None, wrong, hurt=False), votes).cause == "corrupted"
    assert wrong in verdict(Replays(None, wrong, hurt=False), votes).because
    assert verdict(Replays(None, None, hurt=False), votes).cause == "hard batch"


@pytest.mark.parametrize(
    ("votes", "wanted"),
    [
        ({}, ("N",)),
        ({"N": SOME}, ("N",)),
        # One arm at a time, that which costs least first.
        ({"N": ALL}, ("C",)),
        ({"N": ALL, "C": SOME}, ("C",)),
        ({"N": ALL, "C": ALL}, ("E",)),
        ({"N": ALL, "C": ALL, "E": SOME}, ("E",)),
        ({"N": ALL, "C": ALL, "E": ALL}, ("half rate",)),
        ({"N": ALL, "C": NONE}, ("B",)),
        ({"N": ALL, "C": NONE, "B": SOME}, ("B",)),
        ({"N": ALL, "C": NONE, "B": NONE}, ("E",)),
        # At half the rate it spikes, too: no arm here would tell more.
        ({"N": ALL, "C": ALL, "E": ALL, "half rate": ALL}, ()),
        # An older state spikes with any data, but this one does not.
        ({"N": ALL, "C": NONE, "E": ALL}, ()),
    ],
)
def test_what_is_not_clear_says_which_arms_would_decide(votes, wanted):
    found = verdict(SPIKED, votes)
    assert (found.cause, found.next_arms) == ("inconclusive", wanted)


VOTES = st.integers(0, 6).flatmap(lambda of: st.builds(Votes, st.integers(0, of), st.just(of)))


@hypothesis.given(
    votes=st.dictionaries(st.sampled_from(["N", "C", "B", "E", "half rate"]), VOTES),
    rounds=st.integers(1, 4),
)
def test_more_of_the_same_replicates_never_turn_a_cause_into_another(votes, rounds):
    found = verdict(SPIKED, votes).cause
    more = {arm: Votes(v.spiked * rounds, v.of * rounds) for arm, v in votes.items()}
    assert found in ("inconclusive", verdict(SPIKED, more).cause)
