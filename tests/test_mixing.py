"""Whose turn it is, against loops that draw one sequence at a time."""

from __future__ import annotations

import collections
import itertools
import json
import pathlib
import re
from fractions import Fraction

import hypothesis
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from palm_jax import config, mixing, stream
from palm_jax.config import Ramp
from palm_jax.errors import WrongInput
from palm_jax.stream import Stream

SOME = hypothesis.settings(deadline=None, max_examples=40)
NAMES = ("books", "code", "web", "wiki")


def bound(shares) -> Fraction:
    """Tijdeman's, of the corpora that are drawn at all."""
    drawn = sum(share > 0 for share in shares)
    return Fraction(0) if drawn == 1 else 1 - Fraction(1, 2 * drawn - 2)


def naive_turns(shares, num_turns: int) -> list[int]:
    """Turn by turn: of those not ahead by too much if drawn now, the one that can wait least."""
    total, most = sum(shares), bound(shares)
    counts, order = [0] * len(shares), []
    for turn in range(num_turns):
        waits = []
        for corpus, share in enumerate(shares):
            due = Fraction(share, total)
            if share and counts[corpus] + 1 - due * (turn + 1) <= most:
                wait = 0
                while due * (turn + wait + 1) - counts[corpus] <= most:
                    wait += 1
                waits.append((wait, corpus))
        _, corpus = min(waits)
        counts[corpus] += 1
        order.append(corpus)
    return order


some_shares = st.lists(st.integers(0, 9), min_size=1, max_size=5).filter(any)


@given(some_shares)
@SOME
def test_turns_are_those_of_a_loop_that_looks_at_one_turn_after_the_other(weights):
    shares = mixing.shares(weights)
    num_turns = 2 * sum(shares) + 3
    turns = mixing.Turns((0,), (shares,))
    assert turns.order(0, num_turns) == naive_turns(shares, num_turns)


@given(some_shares)
@hypothesis.example([1] * 40)
@hypothesis.example([1, 1, 1, 97])
@hypothesis.example([331, 0, 211, 17, 1])
def test_at_every_prefix_each_corpus_is_within_one_sequence_of_its_share(weights):
    shares = mixing.shares(weights)
    period, counts = sum(shares), [0] * len(shares)
    turns = mixing.Turns((0,), (shares,))
    for n, corpus in enumerate(turns.order(0, 2 * period), 1):
        counts[corpus] += 1
        off = [
            abs(c - Fraction(n * share, period)) for c, share in zip(counts, shares, strict=True)
        ]
        assert max(off) <= bound(shares) < 1
        assert turns.drawn(n) == tuple(counts)
        assert not any(c for c, share in zip(counts, shares, strict=True) if share == 0)


def test_draws_due_together_come_in_the_order_of_names():
    assert mixing.period((1, 1)).order == (0, 1)
    assert mixing.period((1, 1, 1)).order == (0, 1, 2)
    assert mixing.period((3, 1)).order == (0, 0, 1, 0)
    assert mixing.period((7, 2, 1)).order == (0, 0, 1, 0, 0, 2, 0, 0, 1, 0)


@pytest.mark.parametrize(
    ("weights", "shares"),
    [
        ([0.7, 0.2, 0.1], (7, 2, 1)),
        ([3, 1], (3, 1)),
        ([6, 0, 2.0], (3, 0, 1)),
        ([1e-05, 1], (1, 100_000)),
        ([5], (1,)),
        ([0.1 + 0.2, 0.7], (7_500_000_000_000_001, 17_500_000_000_000_000)),  # as it is written
    ],
)
def test_weights_are_the_decimal_numbers_that_are_written(weights, shares):
    assert mixing.shares(weights) == shares


def test_far_indices_are_exact():
    turns = mixing.Turns((0, 10), ((3, 1), (1, 2)))
    assert turns.drawn(10 + 3 * 2**60) == tuple(
        a + b for a, b in zip(turns.drawn(10), (2**60, 2**61), strict=True)
    )
    far = 10 + 3 * 2**60
    assert turns.order(far, far + 7) == turns.order(10, 17)


# Streams: ramp, stages, exclusions


@st.composite
def streams(draw) -> Stream:
    """With corpora, stages of weights, a ramp, and exclusions near the beginning."""
    names = NAMES[: draw(st.integers(1, len(NAMES)))]

    def starts(most: int) -> list[int]:
        later = draw(st.lists(st.integers(1, 9), unique=True, max_size=most))
        return [0, *sorted(later)]

    stages, ramp = starts(2), starts(2)
    mixture = config.Mixture.model_validate_json(
        json.dumps(
            {
                "corpora": {name: f"corpora/{name}" for name in names},
                "starts": stages,
                "weights": [
                    dict(
                        zip(
                            names,
                            draw(
                                st.lists(
                                    st.integers(0, 5), min_size=len(names), max_size=len(names)
                                ).filter(any)
                            ),
                            strict=True,
                        )
                    )
                    for _ in stages
                ],
            }
        )
    )
    sizes = draw(st.lists(st.integers(1, 6), min_size=len(ramp), max_size=len(ramp)))
    return Stream(Ramp(starts=tuple(ramp), sizes=tuple(sizes)), mixture, draw(exclusions(names)))


def exclusions(names) -> st.SearchStrategy[list]:
    one = st.tuples(st.integers(0, 30), st.integers(1, 8), st.sampled_from(names))
    return st.lists(one.map(lambda e: (e[0], e[0] + e[1], e[2])), max_size=4)


def naive_places(fed: Stream, num_steps: int) -> list[list[tuple[str, int]]]:
    """Step by step, sequence by sequence, with a counter for each corpus."""
    names = list(fed.mixture.corpora)
    excluded = {(name, p) for start, stop, name in fed.exclusions for p in range(start, stop)}
    cursors, steps = collections.Counter(), []
    turns = iter(())
    for step in range(num_steps):
        if step in fed.mixture.starts:
            weights = fed.mixture.weights[fed.mixture.starts.index(step)]
            shares = mixing.shares([weights[name] for name in names])
            turns = iter(naive_turns(shares, 6 * num_steps))
        batch = []
        for corpus in itertools.islice(turns, stream.batch_size(fed.ramp, step)):
            name = names[corpus]
            while (name, cursors[name]) in excluded:
                cursors[name] += 1
            batch.append((name, cursors[name]))
            cursors[name] += 1
        steps.append(batch)
    return steps


@given(streams())
@SOME
def test_places_are_those_of_a_loop_that_draws_one_sequence_at_a_time(fed):
    steps = naive_places(fed, 12)
    assert [fed.places(step) for step in range(12)] == steps
    for step in range(12):
        counts = fed.next_positions(step)
        behind = collections.Counter(name for batch in steps[:step] for name, _ in batch)
        for name, position in counts.items():
            # What lies behind was drawn or left out, and what is drawn next is not left out.
            left_out = {
                p
                for start, stop, corpus in fed.exclusions
                if corpus == name
                for p in range(start, stop)
            }
            assert position - len([p for p in left_out if p < position]) == behind[name]
            assert position not in left_out
        assert fed.first_position(step) == sum(counts.values())


@given(streams())
@SOME
def test_at_every_prefix_of_a_stage_the_counts_match_its_weights_whatever_is_excluded(fed):
    counts, n = collections.Counter(), 0
    shares, weights = (), {}
    for step in range(12):
        if step in fed.mixture.starts:
            counts.clear()
            n = 0
            weights = fed.mixture.weights[fed.mixture.starts.index(step)]
            shares = mixing.shares(list(weights.values()))
        for name, _ in fed.places(step):
            counts[name] += 1
            n += 1
            for corpus, weight in weights.items():
                due = Fraction(n * weight, sum(weights.values()))
                assert abs(counts[corpus] - due) <= bound(shares) < 1


@given(streams(), st.data())
@SOME
def test_an_exclusion_moves_no_turn_and_nothing_before_it(fed, draw):
    ((start, stop, name),) = draw.draw(exclusions(tuple(fed.mixture.corpora)).filter(bool))[:1]
    after = Stream(fed.ramp, fed.mixture, [*fed.exclusions, (start, stop, name)])
    for step in range(12):
        for old, new in zip(fed.places(step), after.places(step), strict=True):
            assert new[0] == old[0]
            assert new == old if old[0] != name or old[1] < start else new[1] >= stop


@given(streams(), st.integers(0, 9), st.integers(1, 4))
@SOME
def test_excluding_steps_leaves_out_what_they_drew_of_each_corpus(fed, start, length):
    stop = start + length
    left_out = fed.intervals(start, stop)
    read = {place for step in range(start, stop) for place in fed.places(step)}
    named = {(name, p) for first, last, name in left_out for p in range(first, last)}
    earlier = {(name, p) for first, last, name in fed.exclusions for p in range(first, last)}
    assert read <= named
    assert named <= read | earlier
    after = Stream(fed.ramp, fed.mixture, stream.normalized([*fed.exclusions, *left_out]))
    assert [after.places(s) for s in range(start)] == [fed.places(s) for s in range(start)]
    assert not read & {place for step in range(start, 12) for place in after.places(step)}
    # In the turns of those steps comes what would have come next.
    for name in fed.names:
        following = [p for s in range(start, 40) for c, p in after.places(s) if c == name]
        unskipped = [p for s in range(stop, 40) for c, p in fed.places(s) if c == name]
        assert following[: len(unskipped)] == unskipped[: len(following)]


@given(streams())
@SOME
def test_weights_that_change_later_leave_alone_what_lies_before(fed):
    first = fed.mixture.starts[-1]
    changed = [*fed.mixture.weights[:-1], dict.fromkeys(fed.mixture.corpora, 1)]
    mixture = fed.mixture.model_copy(update={"weights": tuple(changed)})
    after = Stream(fed.ramp, mixture, fed.exclusions)
    assert [after.places(s) for s in range(first)] == [fed.places(s) for s in range(first)]
    assert after.next_positions(first) == fed.next_positions(first)


def test_an_exclusion_of_no_corpus_there_is_is_refused_by_name():
    mixture = config.Mixture(
        corpora={"books": "a", "code": "b"}, weights=({"books": 1, "code": 1},)
    )
    ramp = Ramp(sizes=(2,))
    for exclusion in ((3, 9), (3, 9, "cod")):
        with pytest.raises(WrongInput, match=r"positions 3:9.*there are: books, code"):
            Stream(ramp, mixture, (exclusion,)).places(0)
    with pytest.raises(WrongInput, match=r"positions 3:9 of code.*one, without a name"):
        Stream(ramp, None, ((3, 9, "code"),)).places(0)
    with pytest.raises(WrongInput, match="exclusion 9:3 is empty"):
        Stream(ramp, mixture, ((9, 3, "code"),)).places(0)


def test_one_corpus_is_a_mixture_of_one_turn():
    ramp, excluded = Ramp(starts=(0, 3), sizes=(2, 4)), ((5, 9), (12, 13))
    fed = Stream(ramp, None, excluded)
    allowed = [p for p in range(99) if p not in (5, 6, 7, 8, 12)]
    places = [place for step in range(9) for place in fed.places(step)]
    assert places == [(None, position) for position in allowed[: len(places)]]
    assert [fed.first_position(step) for step in range(5)] == [0, 2, 4, 10, 15]
    assert fed.intervals(2, 4) == ((4, 15),)


# Configs


def refused(**mixture) -> str:
    given = {"corpora": {"books": "a", "code": "b"}, "weights": [{"books": 3, "code": 1}]} | mixture
    with pytest.raises(WrongInput) as caught:
        settings(data={"mixture": given})
    return str(caught.value)


def settings(data) -> config.Config:
    model = {"num_layers": 1, "width": 8, "num_heads": 1, "head_size": 8}
    model |= {"vocabulary_size": 257, "sequence_length": 8}
    return config.from_dict(
        {"steps": 9, "model": model, "data": {"ramp": {"sizes": [8]}, **data}}, "a.yaml"
    )


@pytest.mark.parametrize(
    ("mixture", "said"),
    [
        ({"weights": [{"books": 1}]}, r"weights\[0\] names \['books'\], and corpora \['books', 'c"),
        ({"weights": [{"books": 1, "code": 1, "web": 1}]}, "give each corpus a weight, 0 to leave"),
        ({"weights": [{"books": 0, "code": 0.0}]}, r"weights\[0\] are all 0"),
        ({"weights": [{"books": -1, "code": 1}]}, r"weights\.0\.books: -1 must be a number from 0"),
        ({"weights": [{"books": True, "code": 1}]}, r"weights\.0\.books: True must be a number"),
        ({"weights": [{"books": "1", "code": 1}]}, r"weights\.0\.books: '1' must be a number"),
        ({"weights": [{"books": None, "code": 1}]}, r"weights\.0\.books: None must be a number"),
        ({"weights": {"books": 1, "code": 1}}, r"data\.mixture\.weights=.*array"),
        ({"weights": []}, "starts=.* and 0 weights: need one mapping of weights per stage"),
        ({"starts": [0, 5]}, r"starts=\[0, 5\] and 1 weights"),
        ({"starts": [3]}, "starts that rise from 0"),
        ({"starts": [0, 4, 4], "weights": [{"books": 1, "code": 1}] * 3}, "starts that rise"),
        ({"weights": [{"books": 0.12345678, "code": 1}]}, r"every 56172839 .* 100000 is the most"),
        ({"weights": [{"books": 5e-324, "code": 1}]}, r"weights\[0\].*give rounder weights"),
        ({"corpora": {}}, r"data\.mixture\.corpora"),
        ({"corpora": {"a b": "x"}}, "'a b' is no name of a corpus"),
        ({"corpora": {"a.b": "x"}}, "'a.b' is no name of a corpus"),
        ({"corpora": {"books": "a\0", "code": "b"}}, r"data\.mixture\.corpora\.books"),
        ({"wieghts": []}, r"data\.mixture\.wieghts; did you mean data\.mixture\.weights"),
    ],
)
def test_a_mixture_that_cannot_be_is_refused_by_name(mixture, said):
    message = refused(**mixture)
    assert "data.mixture" in message
    assert len(message) < 1000
    assert re.search(said, message), message


def test_long_periods_are_refused_over_all_stages():
    starts = list(range(12))
    weights = [{"books": 1, "code": 9000 + n} for n in starts]
    said = refused(starts=starts, weights=weights)
    assert r"weights[11]={'books': 1, 'code': 9011}" in said
    assert "every 9012 of them, and 100000 is the most" in said


def test_a_config_has_one_corpus_or_a_mixture():
    mixture = {"corpora": {"books": "a"}, "weights": [{"books": 1}]}
    for data in ({}, {"corpus": None}, {"mixture": None}):
        with pytest.raises(WrongInput, match=r"data: corpus is missing; set data\.corpus=PATH, or"):
            settings(data)
    with pytest.raises(WrongInput, match="corpus='c' is given, and a mixture, too; leave one"):
        settings({"corpus": "c", "mixture": mixture})
    # Over a base with a corpus.
    assert settings({"corpus": None, "mixture": mixture}).data.places == {
        "data.mixture.corpora.books": "a"
    }


def test_the_mixture_in_the_docs_can_be_drawn_from():
    page = (pathlib.Path(__file__).parents[1] / "docs" / "data.md").read_text()
    (shown,) = re.findall("```yaml\n(.*?)```", page, re.DOTALL)
    mixture = settings(yaml.safe_load(shown)["data"]).data.mixture
    assert mixture.shares == ((3, 1), (1, 1))


def test_a_config_of_one_corpus_says_nothing_of_mixtures():
    one = settings({"corpus": "c"})
    assert not [key for key in config.flat(one) if "mixture" in key]
    assert "mixture" not in config.to_yaml(one)
    several = settings({"mixture": {"corpora": {"books": "a"}, "weights": [{"books": 1}]}})
    assert "data.corpus" not in config.flat(several)


def test_folders_of_a_mixture_may_move_and_weights_may_not(tmp_path):
    mixture = {
        "corpora": {"web": "w", "books": "b"},
        "starts": [0, 5],
        "weights": [{"web": 0.25, "books": 0.75}, {"web": 1, "books": 0}],
    }
    before = settings({"mixture": mixture})
    assert before.data.mixture.shares == ((1, 3), (1, 0))
    (tmp_path / "a.yaml").write_text(config.to_yaml(before))
    assert config.load(tmp_path / "a.yaml") == before
    moved = config.override(before, ["data.mixture.corpora.web=elsewhere/w"])
    assert config.fingerprint(moved) == config.fingerprint(before)
    assert list(config.differences(before, moved)) == ["data.mixture.corpora.web"]
    assert config.may_change("data.mixture.corpora.web", before)
    other = config.override(before, ["data.mixture.starts=[0, 6]"])
    assert config.fingerprint(other) != config.fingerprint(before)
    assert not config.may_change("data.mixture.weights", before)
