"""The bigram baseline against a loop written from its definition."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from corpora import make
from hypothesis import given
from hypothesis import strategies as st

from palm_jax.corpus import bigram
from palm_jax.corpus.reader import Corpus


def naive_bits_per_byte(train: list[int], held_out: list[int], size: int, num_bytes: int) -> float:
    bits = 0.0
    for previous, target in itertools.pairwise(held_out):
        follow = [b for a, b in itertools.pairwise(train) if a == previous]
        bits -= math.log2((follow.count(target) + 1) / (len(follow) + size))
    return bits / num_bytes


streams = st.lists(st.integers(0, 4), min_size=2, max_size=30)


@given(streams, streams)
def test_bits_per_byte_equal_a_loop_over_the_targets(train, held_out):
    num_bytes = len(held_out)
    counts = [bigram.count_pairs(np.array(s, np.uint16), 5) for s in (train, held_out)]
    found = bigram.bits_per_byte(*counts, num_bytes)
    assert found == pytest.approx(naive_bits_per_byte(train, held_out, 5, num_bytes), abs=2e-9)


def test_pairs_do_not_overflow_the_type_of_the_tokens():
    pairs = bigram.count_pairs(np.array([256, 256, 255], np.uint16), 257)
    assert pairs[256, 256] == pairs[256, 255] == 1
    assert pairs.sum() == 2


def test_the_manifest_holds_the_baseline_of_the_kept_held_out_sequences(tmp_path, monkeypatch):
    monkeypatch.setattr("palm_jax.corpus.packing._BLOCK_TOKENS", 30)
    documents = {f"{i}": f"the {i} cats and {i * i} dogs".encode() for i in range(12)}
    made = make(tmp_path, documents)
    corpus = Corpus.open(tmp_path / "corpus")
    rows = {s: corpus.read(s, range(corpus.num_sequences(s))) for s in ("train", "held_out")}
    streams = {s: [int(r[0, 0]), *r[:, 1:].reshape(-1).tolist()] for s, r in rows.items()}
    num_bytes = sum(token != 256 for token in streams["held_out"][1:])
    assert num_bytes == made.splits["held_out"].target_bytes
    expected = naive_bits_per_byte(streams["train"], streams["held_out"], 257, num_bytes)
    assert made.bigram_bits_per_byte == pytest.approx(expected, abs=2e-9)
