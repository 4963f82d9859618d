"""Scores of text against plain loops, and vitals that leave their range in made-up records."""

from __future__ import annotations

import zlib

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from palm_jax import data
from palm_jax.corpus import planted, prepare
from palm_jax.corpus.reader import Corpus
from palm_jax.diagnosis import leading, scan, texts
from palm_jax.record.segments import Segment

TEXT = np.frombuffer(b"the model and the step of a spike, again and again. " * 40, np.uint8)


def ordinary(num=64, seed=0):
    rng = np.random.default_rng(seed)
    words = [b"the", b"a", b"model", b"step", b"loss", b"spike", b"batch", b"of", b"again", b"and"]
    rows = [b" ".join(rng.choice(words, 200))[:512] for _ in range(num)]
    return np.array([np.frombuffer(row, np.uint8) for row in rows], np.int32)


@hypothesis.given(st.lists(st.integers(0, 2), max_size=120))
def test_repetition_is_that_of_a_plain_loop(tokens):
    tokens = np.array(tokens, np.int32)
    inside = [False] * len(tokens)
    for period in range(1, 14):
        for first in range(len(tokens)):
            last = first
            while last + period < len(tokens) and tokens[last] == tokens[last + period]:
                last += 1
            if last - first >= period * 31:
                for place in range(first, last + period):
                    inside[place] = True
    wanted = np.mean(inside) if len(tokens) else np.nan
    np.testing.assert_equal(texts.repetition(tokens) if len(tokens) else np.nan, wanted)


@pytest.mark.parametrize(
    ("period", "repeats", "found"), [(1, 32, 1), (13, 32, 1), (13, 31, 0), (14, 40, 0)]
)
def test_thirty_two_repeats_of_a_short_period_are_repetition(period, repeats, found):
    assert texts.repetition(np.tile(np.arange(period), repeats)) == found


def test_what_is_unusual_is_said_with_its_score():
    reference = texts.Reference(ordinary(), 257)
    for row in ordinary(seed=1):
        assert reference.unusual(reference.scores(row)) == {}
    noise = np.random.default_rng(0).integers(0, 256, 512).astype(np.int32)
    assert set(reference.unusual(reference.scores(noise))) >= {"compression", "rare_share"}
    repeated = np.full(512, ord("a"), np.int32)
    off = reference.unusual(reference.scores(repeated))
    assert off["repetition"] > 0 > off["compression"]
    assert reference.scores(noise).compression == len(
        zlib.compress(noise.astype("<i4").tobytes(), 6)
    ) / (4 * 512)


# --- the first vital ---


def record(num=200, **vitals):
    rng = np.random.default_rng(0)
    return [
        (
            step,
            {
                "loss": 2.0,
                "steady": 1 + 0.01 * rng.normal(),
                **{k: f(step) for k, f in vitals.items()},
            },
        )
        for step in range(num)
    ]


def test_the_vital_that_left_its_range_first_comes_first():
    rng = np.random.default_rng(1)
    noise = rng.normal(size=200)
    steps = record(
        early=lambda s: noise[s] + (100 if s >= 170 else 0),
        late=lambda s: [noise[s], noise[s] + (100 if s >= 185 else 0)],
        trend=lambda s: s + 0.1 * noise[s],
        one_off=lambda s: noise[s] + (100 if s == 160 else 0),
        broken=lambda s: "nan" if s >= 188 else noise[s],
        constant=lambda s: 5.0,
    )
    found = leading.departures(steps, onset=190, last=195)
    assert [(d.vital, d.step, d.before_loss) for d in found] == [
        ("early", 170, 20),
        ("late", 185, 5),
        ("broken", 188, 2),
    ]


def test_too_little_history_gives_no_range():
    noise = np.random.default_rng(1).normal(size=200)
    steps = record(num=25, early=lambda s: noise[s] + (100 if s >= 18 else 0))
    assert leading.departures(steps, onset=20, last=24) == []


# --- elsewhere in the corpus ---


@pytest.fixture(scope="module")
def longer(small, tmp_path_factory):
    """Settings over a corpus whose sequences, of 256 tokens, can repeat and compress."""
    folder = tmp_path_factory.mktemp("longer")
    for number, row in enumerate(ordinary(num=200, seed=2)):
        (folder / f"{number:03d}.txt").write_bytes(bytes(row.tolist()) * 3)
    prepare.prepare(
        source=f"text:{folder}/*.txt", out=folder / "corpus", sequence_length=256, held_out=0.1
    )
    return small(
        **{"data.corpus": str(folder / "corpus"), "model.sequence_length": 256},
        **{"data.ramp": {"sizes": [8]}},
    )


def test_a_scan_finds_planted_garbage_and_proposes_its_steps(longer, tmp_path):
    with Corpus.open(longer.data.corpus) as corpus:
        num = corpus.num_sequences("train")
    ids = data.sequence_ids(0, range(8 * 5, 8 * 8), num)
    planted.plant(longer.data.corpus, tmp_path / "corpus", ids, kind="random")
    with Corpus.open(tmp_path / "corpus") as corpus:
        found = scan.scan(corpus, longer, Segment(), range(12))
        none = scan.scan(corpus, longer, Segment(), range(12), kinds=["repetition"])
    assert found.sequences == 12 * 8
    assert {x.sequence for x in found.unusual} == set(ids.tolist())
    assert found.exclude == ((5, 8),)
    # Random tokens do not repeat themselves.
    assert none.unusual == ()


def test_a_clean_corpus_has_nothing_to_leave_out(longer):
    with Corpus.open(longer.data.corpus) as corpus:
        found = scan.scan(corpus, longer, Segment(), range(12))
    assert (found.unusual, found.exclude) == ((), ())
