"""Tokenizers give every byte string back, and text never becomes a control token."""

from __future__ import annotations

import io
import pathlib

import hypothesis.strategies as st
import numpy as np
import pytest
import sentencepiece
from hypothesis import example, given

from palm_jax.corpus import sentencepieces, tokenizers, vocabulary
from palm_jax.corpus.sentencepieces import SentencePieces
from palm_jax.errors import WrongInput

SIZE = 330
HARD = [
    b"",
    b"  two blanks, and one at the end ",
    b"carriage\r\nreturn\rtab\t\n\n\n",
    "▁ literal ▁▁ U+2581".encode(),
    "e\u0301 and é, 😀👩\u200d👩\u200d👧, \ufeff\u00a0\u3000\u2028".encode(),
    b"\xff\xfe\xc0\x80 \xe2\x96 \xf0\x9f\x98",
    "\ud800".encode("utf-8", "surrogatepass"),
    b"\x00a\x00\x00",
    b"</s> <s> <unk> <pad> <0x41> <|end of document|>",
    b"0123456789 12345",
    bytes(range(256)),
]


@pytest.fixture(scope="module")
def text() -> list[bytes]:
    rng = np.random.default_rng(0)
    syllables = ["lo", "ss", "mo", "del", "sp", "ike", "st", "eps", "gra", "di", "ent"]
    words = ["".join(rng.choice(syllables, rng.integers(1, 4))) for _ in range(80)]
    words += ["the", "12", "def f(x):\n    return", "é"]
    return [" ".join(rng.choice(words, 300)).encode() for _ in range(20)]


@pytest.fixture(scope="module")
def model(text) -> bytes:
    return vocabulary.train(text, SIZE)[0]


@pytest.fixture(scope="module")
def pieces(model) -> SentencePieces:
    return SentencePieces(model)


def check_comes_back(tokenizer: tokenizers.Tokenizer, content: bytes) -> None:
    tokens = tokenizer.encode(content)
    assert tokenizer.decode(tokens) == content
    assert tokenizer.num_bytes(tokens) == len(content)
    assert tokenizer.end_of_document not in tokens
    assert tokens.size == 0 or tokens.max() < tokenizer.vocabulary_size
    assert tokens.dtype == np.dtype("<u2")


@pytest.mark.parametrize("content", HARD)
def test_hard_text_comes_back(pieces, content):
    check_comes_back(pieces, content)


@given(st.binary(max_size=80) | st.text(max_size=40).map(lambda t: t.encode("utf-8", "ignore")))
@example(b" \xe2\x96\x81 ")
def test_any_bytes_come_back(pieces, content):
    check_comes_back(pieces, content)
    check_comes_back(tokenizers.ByteTokenizer(), content)


def test_ordinary_text_is_tokenised_as_sentencepiece_does(model, pieces, text):
    plain = sentencepiece.SentencePieceProcessor(model_proto=model)
    assert pieces.encode(text[0]).tolist() == plain.encode(text[0].decode())
    assert len(pieces.encode(text[0])) < len(text[0]) / 2  # it has learnt something


def test_every_digit_is_a_token_of_its_own(pieces):
    tokens = pieces.encode(b"12 345")
    assert [pieces.decode([t]).strip() for t in tokens if pieces.decode([t]) != b" "] == [
        *(b"1", b"2", b"3", b"4", b"5")
    ]


def test_long_text_is_cut_before_a_blank_and_comes_back(pieces, monkeypatch):
    monkeypatch.setattr(sentencepieces, "_MOST_CHARACTERS", 7)
    for content in [b"the model the model", b"x" * 40, b" " * 20, "é".encode() * 9]:
        check_comes_back(pieces, content)


def test_training_again_gives_the_same_bytes(text, model):
    again, training = vocabulary.train(text, SIZE)
    assert again == model
    assert (training.threads, training.sample_documents) == (1, 20)
    assert training.sample_bytes == sum(map(len, text))


@pytest.mark.parametrize(
    ("size", "said"),
    [(258, "must be above 258"), (100_000, "value <= "), (259, "smaller than required")],
)
def test_a_vocabulary_that_cannot_be_is_refused_with_what_can(text, size, said):
    with pytest.raises(WrongInput, match=f"sentencepiece:train:{size}.*({said})"):
        vocabulary.train(text, size)


def trained(text: list[bytes], **settings: object) -> bytes:
    """A model by SentencePiece alone, as others train it."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(t.decode() for t in text),
        model_writer=model,
        vocab_size=SIZE,
        minloglevel=3,
        **{"byte_fallback": True, "normalization_rule_name": "identity"} | settings,
    )
    return model.getvalue()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"normalization_rule_name": "nmt_nfkc"}, "nmt_nfkc.*rewrites text"),
        ({"byte_fallback": False}, "no pieces for 256 of the 256 bytes"),
        ({"model_type": "word"}, "whole words"),
    ],
)
def test_a_model_that_loses_text_is_refused_with_the_remedy(text, tmp_path, settings, said):
    path = tmp_path / "their.model"
    path.write_bytes(trained(text[:5], hard_vocab_limit=False, **settings))
    with pytest.raises(WrongInput, match=f"their.model cannot be used: .*{said}"):
        sentencepieces.read(path)


def test_a_model_that_writes_blanks_as_they_are_is_refused(model):
    changed = sentencepieces._ModelProto.FromString(model)
    changed.normalizer_spec.escape_whitespaces = False
    with pytest.raises(ValueError, match="escape blanks"):
        SentencePieces(changed.SerializeToString())


@pytest.mark.parametrize("kind", ["unigram", "bpe", "char"])
def test_models_of_others_are_lossless_here(text, kind):
    # Theirs put a blank before the text and drop others; user-defined pieces are text.
    model = trained(
        text, model_type=kind, user_defined_symbols=["<turn>", "▁▁"], hard_vocab_limit=False
    )
    tokenizer = SentencePieces(model)
    for content in [*HARD, b"<turn>  x <turn>"]:
        check_comes_back(tokenizer, content)


def test_a_model_without_an_end_of_sentence_gets_one_more_id(text):
    tokenizer = SentencePieces(trained(text, eos_id=-1))
    assert (tokenizer.end_of_document, tokenizer.vocabulary_size) == (SIZE, SIZE + 1)


@pytest.mark.parametrize("damage", [b"", b"garbage", b"half"])
def test_a_file_that_is_no_model_is_refused_by_name(tmp_path, model, damage):
    path = tmp_path / "x.model"
    path.write_bytes(model[: len(model) // 2] if damage == b"half" else damage)
    with pytest.raises(WrongInput, match=r"x\.model cannot be used"):
        sentencepieces.read(path)
    with pytest.raises(WrongInput, match=r"cannot read the tokenizer .*nowhere"):
        sentencepieces.read(pathlib.Path("nowhere"))


def test_what_stands_for_no_text_is_not_decoded(pieces):
    for token in (pieces.end_of_document, 0, SIZE, -1):
        with pytest.raises(ValueError, match=f"token {token} stands for no text"):
            pieces.decode(np.array([token]))


@given(st.lists(st.binary(max_size=8), max_size=20), st.integers(1, 40), st.randoms())
def test_a_sample_does_not_depend_on_the_order_of_documents(contents, most, random):
    keyed = [(content.rjust(16, b"k"), content) for content in contents]
    expected: list[bytes] = []
    for _, content in sorted(dict(keyed).items()):
        if sum(map(len, expected)) >= most:
            break
        expected.append(content)
    random.shuffle(keyed)
    sample = vocabulary.Sample(most)
    for key, content in keyed:
        sample.offer(key, content)
    assert sample.documents() == expected
