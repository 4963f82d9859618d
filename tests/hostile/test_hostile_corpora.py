"""A damaged corpus gives its own rows and names, or is refused by name; nothing else."""

from __future__ import annotations

import json
import os
import pathlib
import shutil

import hypothesis
import hypothesis.strategies as st
import mutations
import numpy as np
import pytest
from array_record.python import array_record_module
from corpus import corpora

from palm_jax.corpus import manifest, packing, prepare, reader, tokenizers
from palm_jax.corpus.reader import Corpus
from palm_jax.errors import CannotDo, WrongInput

FILES = ("manifest.json", "train.names.jsonl", "train.offsets.npy")
SHARD = "train-00000-of-00001.arrayrecord"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> pathlib.Path:
    place = tmp_path_factory.mktemp("corpora")
    documents = {f"{n:02d}": corpora.document("train", 9 + n, salt=n) for n in range(6)}
    corpora.make(place, documents | {"held_out": corpora.document("held_out", 20)})
    return place / "corpus"


def read(folder: pathlib.Path) -> None:
    """All that a corpus is asked."""
    with Corpus.open(folder) as corpus:
        num = corpus.num_sequences("train")
        rows = corpus.read("train", range(num))
        assert rows.shape == (num, corpus.sequence_length + 1)
        for number, row in enumerate(rows):
            corpus.decode(row)
            spans = corpus.documents("train", number)
            assert [span.start for span in spans[1:]] == [span.stop for span in spans[:-1]]
            assert spans[-1].stop == corpus.sequence_length + 1
            assert all(isinstance(span.name, str) for span in spans)
        corpus.verify()


def text_of(folder: pathlib.Path, name: str) -> str:
    return (folder / name).read_text()


@st.composite
def changes(draw: st.DrawFn, folder: pathlib.Path) -> tuple[str, bytes]:
    name = draw(st.sampled_from([*FILES, SHARD]))
    if name.endswith((".json", ".jsonl")):
        return name, draw(mutations.files(text_of(folder, name), name))
    return name, draw(mutations.byte_changes((folder / name).read_bytes()))


@mutations.QUICK
@hypothesis.given(st.data())
def test_any_damage_is_read_or_refused_by_name(folder, data):
    name, content = data.draw(changes(folder))
    with mutations.damaged(folder, name, content):
        mutations.answered(lambda: read(folder), folder)


@pytest.mark.slow
@mutations.THOROUGH
@hypothesis.given(st.data())
def test_much_damage_is_read_or_refused_by_name(folder, data):
    name, content = data.draw(changes(folder))
    with mutations.damaged(folder, name, content):
        mutations.answered(lambda: read(folder), folder)


@pytest.mark.parametrize("name", [*FILES, SHARD])
@pytest.mark.parametrize("kind", mutations.KINDS)
def test_what_is_no_file_is_refused_and_not_waited_for(folder, name, kind):
    with mutations.damaged(folder, name, kind):
        assert mutations.answered(lambda: read(folder) or True, folder) is None


def signed(folder: pathlib.Path, **entries: object) -> None:
    """Change the manifest, and its digest with it."""
    path = folder / manifest.FILE_NAME
    fields = json.loads(path.read_text())
    for split in fields["splits"].values():
        split["sequences"] = entries.get("sequences", split["sequences"])
        split["shards"][0]["sequences"] = split["sequences"]
        length = entries.get("sequence_length", fields["sequence_length"])
        split["tokens"] = split["sequences"] * length + split["tail_tokens"]
    fields |= {key: value for key, value in entries.items() if key != "sequences"}
    splits = {
        k: manifest.Split.model_validate_json(json.dumps(v)) for k, v in fields["splits"].items()
    }
    tokenizer = manifest.Tokenizer.model_validate_json(json.dumps(fields["tokenizer"]))
    fields["digest"] = manifest.corpus_digest(tokenizer, fields["sequence_length"], splits)
    path.write_text(json.dumps(fields))


def tokenizer(**entries: int) -> dict[str, object]:
    return {"tokenizer": manifest.Tokenizer.model_dump(tokenizers.BYTES) | entries}


@pytest.fixture
def copied(folder, tmp_path) -> pathlib.Path:
    return shutil.copytree(folder, tmp_path / "corpus")


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ({"sequence_length": 10**15}, "too few for the"),
        ({"sequences": 10**15}, "too few for the"),
        (tokenizer(vocabulary_size=300), "vocabulary_size=300, but its tokenizer"),
        (tokenizer(end_of_document=0), "end_of_document=0, but its tokenizer"),
        ({"dtype": "uint32"}, "dtype=uint32, but ids below 257 take uint16"),
    ],
)
def test_a_manifest_that_promises_more_than_there_is_is_refused(copied, entries, said):
    signed(copied, **entries)
    with pytest.raises(WrongInput, match=said):
        Corpus.open(copied)


def test_records_that_are_too_long_for_what_was_promised_are_refused(copied):
    with Corpus.open(copied) as corpus:
        num = corpus.num_sequences("train")
    writer = array_record_module.ArrayRecordWriter(str(copied / SHARD), packing.WRITER_OPTIONS)
    for _ in range(num):
        writer.write(b"\0" * 1000)
    writer.close()
    with Corpus.open(copied) as corpus, pytest.raises(WrongInput, match="has 1000 bytes, not 18"):
        corpus.read("train", [0])


@pytest.mark.parametrize(
    "offsets",
    [
        lambda there: there.astype(np.float64),
        lambda there: there.astype(">i8"),
        lambda there: there[:, 0],
        lambda there: there[::-1].copy(),
        lambda there: there - 1,
        lambda there: np.where(np.arange(there.size).reshape(there.shape) == 4, 10**15, there),
    ],
)
def test_offsets_that_are_none_are_refused(copied, offsets):
    path = copied / "train.offsets.npy"
    np.save(path, offsets(np.load(path)))
    with pytest.raises(WrongInput, match=r"train\.offsets\.npy"):
        read(copied)


@pytest.mark.parametrize(
    "save", [np.savez, lambda path, x: np.save(path, np.array([x, {}], object))]
)
def test_offsets_in_another_format_are_not_unpacked(copied, save):
    path = copied / "train.offsets.npy"
    offsets = np.load(path)
    with path.open("wb") as file:
        save(file, offsets)
    with Corpus.open(copied) as corpus, pytest.raises(WrongInput, match=r"train\.offsets\.npy"):
        corpus.documents("train", 0)


def test_offsets_that_promise_more_than_there_is_take_no_memory(copied):
    path = copied / "train.offsets.npy"
    path.write_bytes(path.read_bytes().replace(b"'shape': (7, 2)", b"'shape': (99999999, 2)"))
    with pytest.raises(WrongInput, match=r"are not those of"):
        reader._mapped(path, np.dtype("<i8"), (99999999, 2))


def test_preparing_removes_nothing_that_a_link_leads_to(tmp_path):
    source = corpora.write_documents(tmp_path / "text", {"a": b"x" * 90, "b": b"y" * 99})
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").write_text("kept")
    (tmp_path / ".corpus.preparing").symlink_to(tmp_path / "precious")
    with pytest.raises(CannotDo, match="cannot write the corpus"):
        prepare.prepare(
            source=source, out=tmp_path / "corpus", sequence_length=8, held_out=corpora.HELD_OUT
        )
    assert (tmp_path / "precious" / "file").read_text() == "kept"


def test_a_corpus_that_no_file_can_be_named_is_refused():
    for name in ("a\0b", "a\ud800"):
        mutations.answered(lambda name=name: Corpus.open(name), manifest.FILE_NAME)


def test_a_source_of_other_things_than_files_is_refused(tmp_path):
    os.mkfifo(tmp_path / "fifo.txt")
    (tmp_path / "endless.txt").symlink_to("/dev/zero")
    with pytest.raises(WrongInput, match="matches no file"):
        prepare.prepare(source=f"text:{tmp_path}/*.txt", out=tmp_path / "out", sequence_length=8)
