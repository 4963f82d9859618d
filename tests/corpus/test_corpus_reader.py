"""Reading: the right rows for any ids, and no damaged corpus is used in silence."""

from __future__ import annotations

import concurrent.futures
import json
import pathlib
import shutil

import numpy as np
import pytest
from array_record.python import array_record_module
from corpora import document, make, with_sequences

from palm_jax.corpus import manifest as manifests
from palm_jax.corpus.reader import END_MARKER, Corpus, DocumentSpan
from palm_jax.errors import WrongInput

TWO_RECORDS = 2 * 9 * 2  # bytes: uint16, 8 targets


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("reader")
    with_sequences(folder, 7, shard_bytes=TWO_RECORDS)
    return folder


@pytest.fixture
def folder(prepared, tmp_path) -> pathlib.Path:
    """A copy to damage."""
    return shutil.copytree(prepared / "corpus", tmp_path / "corpus")


def stream(prepared: pathlib.Path) -> list[int]:
    return [256, *(prepared / "documents" / "train").read_bytes(), 256]


def test_ids_in_any_order_come_from_any_shard_in_that_order(prepared):
    corpus = Corpus.open(prepared / "corpus")
    assert len(corpus.manifest.splits["train"].shards) == 4
    ids = [6, 0, 3, 3, 5, 1, 0]
    expected = [stream(prepared)[8 * i : 8 * i + 9] for i in ids]
    for given in (ids, np.array(ids), np.array(ids, np.uint8)):
        rows = corpus.read("train", given)
        assert rows.dtype == np.int32
        assert rows.tolist() == expected
    assert corpus.read("train", []).shape == (0, 9)
    assert corpus.sequence_length == 8


@pytest.mark.parametrize("strange", [-1, 7, 2**31, 2**40])
def test_an_id_out_of_range_is_an_error_and_never_wraps(prepared, strange):
    corpus = Corpus.open(prepared / "corpus")
    with pytest.raises(WrongInput, match=rf"sequence {strange} .* has 7"):
        corpus.read("train", [0, strange])
    with pytest.raises(WrongInput, match=rf"sequence {strange} .* has 7"):
        corpus.documents("train", strange)


def test_another_split_than_there_are_is_refused_by_name(prepared):
    corpus = Corpus.open(prepared / "corpus")
    for use in (corpus.num_sequences, lambda s: corpus.read(s, [0])):
        with pytest.raises(WrongInput, match="no split 'validation'; there are: train, held_out"):
            use("validation")


def test_many_threads_read_the_same_rows(prepared):
    corpus = Corpus.open(prepared / "corpus")
    expected = np.array([stream(prepared)[8 * i : 8 * i + 9] for i in range(7)])
    rng = np.random.default_rng(0)
    wanted = [rng.integers(0, 7, 20) for _ in range(200)]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda ids: corpus.read("train", ids), wanted))
    assert all((rows == expected[ids]).all() for ids, rows in zip(wanted, found, strict=True))


def test_a_missing_corpus_says_how_to_make_one(tmp_path):
    for path in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(WrongInput, match=rf"{path}.*palm-jax data prepare"):
            Corpus.open(path)
    with pytest.raises(WrongInput, match="gs://bucket/corpus is a URL"):
        Corpus.open("gs://bucket/corpus")


def edited(folder: pathlib.Path, **entries: object) -> None:
    path = folder / manifests.FILE_NAME
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


@pytest.mark.parametrize(
    ("entries", "word"),
    [
        ({"format": 1}, "format"),
        ({"colour": "red"}, "colour"),
        ({"sequence_length": 16}, "add up"),
        ({"sequence_length": "8"}, "sequence_length"),
        ({"drop_duplicates": "no"}, "drop_duplicates"),
        ({"dtype": "uint32"}, "dtype"),
        ({"empty_documents": 1}, "empty_documents"),
        ({"splits": {}}, "splits"),
    ],
)
def test_an_edited_manifest_is_refused_and_the_entry_named(folder, entries, word):
    edited(folder, **entries)
    with pytest.raises(WrongInput, match=rf"manifest\.json.*{word}"):
        Corpus.open(folder)


def test_a_manifest_that_is_not_json_is_refused(folder):
    (folder / manifests.FILE_NAME).write_text("{")
    with pytest.raises(WrongInput, match=r"manifest\.json"):
        Corpus.open(folder)


def test_a_missing_shard_is_named(folder):
    (folder / "train-00002-of-00004.arrayrecord").unlink()
    with pytest.raises(WrongInput, match=r"train-00002-of-00004\.arrayrecord is missing"):
        Corpus.open(folder)


def test_a_shard_cut_off_or_with_fewer_records_is_named(folder):
    path = folder / "train-00001-of-00004.arrayrecord"
    whole = path.read_bytes()
    path.write_bytes(whole[:100])
    with pytest.raises(WrongInput, match=r"train-00001.* has 0 sequences, the manifest says 2"):
        Corpus.open(folder)
    (folder / "train-00003-of-00004.arrayrecord").replace(path)
    with pytest.raises(WrongInput, match=r"train-00001.* has 1 sequences, the manifest says 2"):
        Corpus.open(folder)


def write_shard(path: pathlib.Path, records: list[bytes]) -> None:
    writer = array_record_module.ArrayRecordWriter(str(path), "group_size:1,uncompressed")
    for record in records:
        writer.write(record)
    writer.close()


def test_a_record_of_the_wrong_length_or_vocabulary_is_named(folder):
    path = folder / "train-00001-of-00004.arrayrecord"
    write_shard(path, [bytes(18), bytes(16)])
    corpus = Corpus.open(folder)
    assert corpus.read("train", [2]).tolist() == [[0] * 9]
    with pytest.raises(WrongInput, match=r"train-00001.*record 1 has 16 bytes, not 18"):
        corpus.read("train", [3])
    write_shard(path, [bytes(18), np.array([257] * 9, "<u2").tobytes()])
    with pytest.raises(WrongInput, match=r"train-00001.*token 257"):
        Corpus.open(folder).read("train", [3])


def test_a_changed_byte_is_named_by_verify_and_is_never_read_as_data(folder):
    path = folder / "train-00002-of-00004.arrayrecord"
    content = bytearray(path.read_bytes())
    text = Corpus.open(folder).read("train", [5]).astype("<u2").tobytes()
    content[content.index(text) + 4] ^= 1
    path.write_bytes(content)
    corpus = Corpus.open(folder)
    with pytest.raises(WrongInput, match=r"train-00002-of-00004\.arrayrecord is not what"):
        corpus.verify()
    with pytest.raises(WrongInput, match=r"train-00002-of-00004\.arrayrecord is damaged"):
        corpus.read("train", [5])
    assert corpus.read("train", [6]).shape == (1, 9)  # on another shard


def test_a_damaged_index_is_named(folder):
    (folder / "train.names.jsonl").write_text('"renamed"\n"one too many"\n')
    corpus = Corpus.open(folder)
    with pytest.raises(WrongInput, match=r"train\.names\.jsonl is not what was prepared"):
        corpus.verify()
    with pytest.raises(WrongInput, match="57, 8"):
        corpus.documents("train", 0)
    (folder / "train.offsets.npy").unlink()
    with pytest.raises(WrongInput, match=r"train\.offsets\.npy"):
        Corpus.open(folder).documents("train", 0)
    with pytest.raises(WrongInput, match=r"train\.offsets\.npy"):
        Corpus.open(folder).verify()


def test_spans_cover_a_sequence_and_lead_back_to_the_documents(tmp_path):
    documents = {f"{i:02d}": document("train", 4 + i, salt=i) for i in range(12)}
    documents["held_out"] = document("held_out", 20)
    make(tmp_path, documents)
    corpus = Corpus.open(tmp_path / "corpus")
    seen: dict[str, list[int]] = {}
    for i in range(corpus.num_sequences("train")):
        (row,) = corpus.read("train", [i])
        spans = corpus.documents("train", i)
        assert [span.start for span in spans] == [i == 0, *(span.stop for span in spans[:-1])]
        assert spans[-1].stop == 9
        for span in spans:
            text = [*documents[span.name], 256]
            tokens = row[span.start : span.stop].tolist()
            assert tokens == text[span.offset : span.offset + len(tokens)]
            # A border token belongs to two sequences; count it in the one where it is a target.
            seen.setdefault(span.name, []).extend(tokens[1:] if span.start == 0 else tokens)
    whole = [name for name, tokens in seen.items() if tokens == [*documents[name], 256]]
    assert len(whole) >= 11  # all but the one whose end is in the tail


def test_a_document_longer_than_many_sequences_is_one_span_in_each(prepared):
    corpus = Corpus.open(prepared / "corpus")
    assert corpus.documents("train", 0) == [DocumentSpan("train", 1, 9, 0)]
    assert corpus.documents("train", 3) == [DocumentSpan("train", 0, 9, 23)]


def test_decoding_marks_ends_and_survives_half_a_character(prepared):
    corpus = Corpus.open(prepared / "corpus")
    row = np.array([256, *"né".encode()[:-1], 256, 256, *b"x"], np.int32)
    assert corpus.decode(row) == f"{END_MARKER}n\ufffd{END_MARKER}{END_MARKER}x"
    assert corpus.decode(np.array([], np.int32)) == ""
    with pytest.raises(ValueError, match="token 300 is not a byte"):
        corpus.decode(np.array([300]))


def test_a_corpus_can_be_closed(prepared):
    with Corpus.open(prepared / "corpus") as corpus:
        assert corpus.read("held_out", [0]).shape == (1, 9)
