"""Statistics of a corpus are counts that a loop over its documents gives as well."""

from __future__ import annotations

import collections
import math
import xml.etree.ElementTree

import pytest
from corpora import document, make

from palm_jax.corpus import picture, stats
from palm_jax.corpus.reader import Corpus

DOCUMENTS = {f"{i:02d}": document("train", 4 + 9 * i, salt=i) for i in range(30)}
DOCUMENTS |= {f"copy of {i:02d}": DOCUMENTS[f"{i:02d}"] for i in range(3)}
DOCUMENTS |= {f"held {i}": document("held_out", 20 + i, salt=i) for i in range(4)}


@pytest.fixture
def corpus(tmp_path):
    make(tmp_path, DOCUMENTS)
    with Corpus.open(tmp_path / "corpus") as opened:
        yield opened


def test_lengths_tokens_and_copies_are_those_of_the_documents(corpus):
    found = stats.stats(corpus)
    texts = [text for name, text in DOCUMENTS.items() if not name.startswith("held")]
    train = found.splits["train"]
    assert (train.documents, train.copies) == (33, 3)
    assert train.bytes == train.tokens == sum(map(len, texts))
    for bin in train.lengths:
        assert bin.documents == sum(bin.low <= len(text) <= bin.high for text in texts)
    assert sum(bin.documents for bin in train.lengths) == 33


def test_shares_of_tokens_are_those_of_the_targets(corpus):
    found = stats.stats(corpus)
    rows = corpus.read("train", range(corpus.num_sequences("train")))
    counts = collections.Counter(rows[:, 1:].reshape(-1).tolist())
    total = sum(counts.values())
    assert found.looked_at == len(rows)
    assert found.unused_ids == 257 - len(counts)
    assert [f.share for f in found.frequent] == [n / total for _, n in counts.most_common(20)]
    # Sums in another order: the last bits may differ.
    assert found.entropy == pytest.approx(
        sum(-n / total * math.log2(n / total) for n in counts.values()), rel=1e-12
    )
    by_rank = sorted(counts.values(), reverse=True)
    assert found.ranked[:3] == (by_rank[0] / total, by_rank[1] / total, by_rank[3] / total)


def test_text_that_repeats_itself_stands_out_with_its_source(tmp_path):
    usual = {name: text for name, text in DOCUMENTS.items() if name.isdecimal()}
    loud = b"ab" * 200
    held_out = {"held": document("held_out", 90)}
    make(tmp_path, usual | {"loud": loud} | held_out, sequence_length=80)
    with Corpus.open(tmp_path / "corpus") as corpus:
        if corpus.manifest.splits["train"].bytes < 400 + sum(map(len, usual.values())):
            pytest.fail("the loud document is not in the split train")
        (first, *_) = stats.stats(corpus).outliers
        assert first.source == "loud"
        assert "abab" in first.text


def test_documents_held_out_of_one_corpus_and_trained_on_in_another_are_counted(tmp_path):
    make(tmp_path / "one", DOCUMENTS)
    # Held out by another fraction, so that some of the first's are trained on.
    make(tmp_path / "two", DOCUMENTS, held_out=0.3)
    with Corpus.open(tmp_path / "one/corpus") as one, Corpus.open(tmp_path / "two/corpus") as two:
        held_out = {DOCUMENTS[n] for n in names(one, "held_out")}
        train = {DOCUMENTS[n] for n in names(two, "train")}
        assert stats.overlap(one, two).documents == len(held_out & train) > 0
        assert stats.overlap(one, one).documents == 0


def names(corpus: Corpus, split: str) -> list[str]:
    index = corpus.index(split)
    return [index.name(i) for i in range(corpus.manifest.splits[split].documents)]


def test_the_picture_is_a_document_that_tells_its_counts(corpus):
    drawn = picture.draw(stats.stats(corpus), "a <title> & more")
    root = xml.etree.ElementTree.fromstring(drawn)
    texts = [element.text for element in root.iter() if element.text]
    assert "a <title> & more" in texts
    assert any("16 to 31 tokens" in text for text in texts)
