"""Generated tokens as text."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from palm_jax.corpus import sentencepieces
from palm_jax.corpus.tokenizers import ByteTokenizer
from palm_jax.use import texts

BYTES = ByteTokenizer()


def streamed(content: bytes, cuts: list[int]) -> list[str]:
    stream, tokens = texts.Stream(BYTES), list(content)
    places = [0, *sorted(cut % (len(tokens) + 1) for cut in cuts), len(tokens)]
    pieces = [stream(tokens[a:b]) for a, b in itertools.pairwise(places)]
    return [*pieces, stream([], is_last=True)]


@given(st.text(), st.lists(st.integers(0, 1000)))
def test_a_stream_is_the_text_wherever_it_is_cut(text, cuts):
    pieces = streamed(text.encode(), cuts)
    assert "".join(pieces) == text
    assert all(piece in text for piece in pieces)


@given(st.binary(), st.lists(st.integers(0, 1000)))
def test_bytes_that_are_no_utf8_are_replaced_wherever_they_are_cut(content, cuts):
    assert "".join(streamed(content, cuts)) == content.decode("utf-8", errors="replace")


def test_a_character_waits_for_all_its_bytes():
    stream = texts.Stream(BYTES)
    first, second, third = "€".encode()
    assert [stream([first]), stream([second]), stream([third])] == ["", "", "€"]
    assert [stream([first]), stream([], is_last=True)] == ["", "\N{REPLACEMENT CHARACTER}"]


def test_ends_of_documents_are_no_text():
    assert texts.content(BYTES, [72, BYTES.end_of_document, 105]) == b"Hi"


def test_a_terminal_is_shown_nothing_that_steers_it():
    assert texts.shown("a\x1b[2J\x07\r\n\tb\x9b") == "a·[2J··\n\tb·"
    assert texts.shown("naïve 中文 🙂") == "naïve 中文 🙂"


@pytest.fixture(scope="module")
def pieces(tmp_path_factory):
    """A vocabulary of SentencePiece."""
    import sentencepiece

    folder = tmp_path_factory.mktemp("pieces")
    rng = random.Random(0)
    words = ["the", "model", "step", "loss", "spike", "batch", "token", "again"]
    text = folder / "text"
    text.write_text("\n".join(" ".join(rng.choices(words, k=12)) for _ in range(300)))
    sentencepiece.SentencePieceTrainer.train(
        input=str(text),
        model_prefix=str(folder / "m"),
        vocab_size=300,
        byte_fallback=True,
        normalization_rule_name="identity",
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return sentencepieces.read(folder / "m.model")


def test_pieces_of_bytes_are_joined_to_characters(pieces):
    text = "the model 中文 again €"
    tokens = pieces.encode(text.encode()).tolist()
    stream = texts.Stream(pieces)
    shown = [stream([token]) for token in tokens]
    assert "".join(shown) == text
    assert "" in shown  # of a character outside the vocabulary, but for its last byte


def test_pieces_that_stand_for_no_text_are_none(pieces):
    """The unknown and the control tokens, which a model may say like any other."""
    silent = [t for t in range(pieces.vocabulary_size) if not pieces.num_bytes(np.asarray([t]))]
    assert len(silent) >= 3
    around = pieces.encode(b"the loss").tolist()
    assert texts.content(pieces, [*silent, *around, *silent]) == b"the loss"
