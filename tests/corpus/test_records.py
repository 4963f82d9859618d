"""Documents in JSON lines and in datasets of tensorflow_datasets: all of them, or an error."""

from __future__ import annotations

import gzip
import json
import pathlib
import sys

import numpy as np
import pyarrow
import pytest
import tensorflow_datasets as tfds
from corpora import HELD_OUT, document

from palm_jax.corpus import sources
from palm_jax.corpus.prepare import merge, prepare, prepare_part
from palm_jax.corpus.reader import Corpus
from palm_jax.errors import WrongInput

TEXTS = ["", " ", "a normal text\r\n", "é \u2581 😀", "x" * 100, "</s>", "\ud800"]


def lines(texts: list[str], field: str = "text") -> bytes:
    return b"".join(json.dumps({"id": 1, field: text}).encode() + b"\n" for text in texts)


def zstd(content: bytes) -> bytes:
    return pyarrow.compress(content, "zstd", asbytes=True)


COMPRESS = {"": bytes, ".gz": gzip.compress, ".zst": zstd}


def contents(source: sources.Source) -> list[bytes]:
    return [found.content for found in source.documents()]


@pytest.mark.parametrize("suffix", COMPRESS)
def test_every_line_is_a_document_however_the_file_is_compressed(tmp_path, suffix, monkeypatch):
    monkeypatch.setattr(sources, "CHUNK_BYTES", 7)
    path = tmp_path / f"a.jsonl{suffix}"
    # As many tools write them: several members in one file, a blank line, no line end at last.
    halves = lines(TEXTS[:3]) + b"\n  \n", lines(TEXTS[3:])[:-1]
    path.write_bytes(b"".join(COMPRESS[suffix](half) for half in halves))
    found = list(sources.open_source(f"jsonl:{path}").documents())
    assert [d.content for d in found] == [t.encode("utf-8", "surrogatepass") for t in TEXTS]
    assert [d.name for d in found][:4] == [f"a.jsonl{suffix}:{n}" for n in (1, 2, 3, 6)]


def test_the_field_is_the_word_after_the_last_colon(tmp_path):
    (tmp_path / "a:b.jsonl").write_bytes(lines(["one"], "body"))
    assert contents(sources.open_source(f"jsonl:{tmp_path}/a:b.jsonl:body")) == [b"one"]
    assert len(sources.open_source(f"jsonl:{tmp_path}/a:b.jsonl").units) == 1
    with pytest.raises(WrongInput, match=r"has no field 'text'; it has: id, body"):
        contents(sources.open_source(f"jsonl:{tmp_path}/*:text"))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b'{"text": "cut', "line 2 is not JSON"),
        (b'{"text": "\xff"}', "line 2 is not JSON"),
        (b"[" * 100_000, "line 2 is not JSON"),
        (b'["text"]', "line 2 is no JSON object"),
        (b'{"text": 3}', "line 2: field 'text' is no text: 3"),
        (b'{"text": null}', "line 2: field 'text' is no text: None"),
        (b"{}", "line 2 has no field 'text'; it has: none"),
    ],
)
def test_a_line_that_is_no_document_is_named(tmp_path, line, said):
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines(["fine"]) + line + b"\n")
    with pytest.raises(WrongInput, match=rf"a\.jsonl, {said}"):
        contents(sources.open_source(f"jsonl:{path}"))


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize("keep", [0.5, 0.95])
def test_a_compressed_file_that_is_cut_off_is_refused(tmp_path, suffix, keep):
    rng = np.random.default_rng(0)
    whole = COMPRESS[suffix](lines([str(rng.random()) for _ in range(1000)]))
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(whole[: int(len(whole) * keep)])
    with pytest.raises(WrongInput, match=rf"a\.jsonl{suffix}"):
        contents(sources.open_source(f"jsonl:{path}"))
    path.write_bytes(b"no compressed file")
    with pytest.raises(WrongInput, match=rf"cannot read .*a\.jsonl{suffix}"):
        contents(sources.open_source(f"jsonl:{path}"))


def test_what_does_not_belong_to_a_source_is_refused(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(lines(["x"]))
    path = f"jsonl:{tmp_path}/a.jsonl"
    for given, said in (
        ({"document_separator": "%%"}, "document_separator='%%' does not apply"),
        ({"data_dir": "there"}, "data_dir=there is for source=tfds"),
    ):
        with pytest.raises(WrongInput, match=said):
            sources.open_source(path, **given)
    with pytest.raises(WrongInput, match="is given twice"):
        sources.open_source([path, path])
    with pytest.raises(WrongInput, match="is a URL"):
        sources.open_source("jsonl:gs://bucket/*.jsonl")
    with pytest.raises(WrongInput, match="matches no file"):
        sources.open_source(f"jsonl:{tmp_path}/b*.jsonl")


class Stories(tfds.core.GeneratorBasedBuilder):
    """A dataset of made-up text, beside a number and a picture that nobody asks for."""

    VERSION = tfds.core.Version("1.2.0")

    def _info(self) -> tfds.core.DatasetInfo:
        features = tfds.features.FeaturesDict(
            {"text": tfds.features.Text(), "title": tfds.features.Text(), "number": np.int64}
        )
        return tfds.core.DatasetInfo(builder=self, features=features)

    def _split_generators(self, manager):
        return {
            "train": self._generate_examples(range(600)),
            "test": self._generate_examples(range(3)),
        }

    def _generate_examples(self, numbers):
        for n in numbers:
            yield n, {"text": f"story {n} é\r\n" * (1 + n % 3), "title": f"t{n}", "number": n}


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("datasets")
    builder = Stories(data_dir=folder, file_format="array_record")
    builder.download_and_prepare(download_config=tfds.download.DownloadConfig(num_shards=3))
    return folder


def test_a_prepared_dataset_is_read_whole_and_without_tensorflow(data_dir):
    source = sources.open_source("tfds:stories", data_dir=str(data_dir))
    assert len(source.units) == 3
    expected = sorted(f"story {n} é\r\n".encode() * (1 + n % 3) for n in range(600))
    assert sorted(contents(source)) == expected
    names = [found.name for found in source.documents()]
    assert names == [f"stories/1.2.0@train#{n}" for n in range(600)]
    titles = sources.open_source("tfds:stories:1.2.0@train#title", data_dir=str(data_dir))
    assert sorted(contents(titles)) == sorted(f"t{n}".encode() for n in range(600))
    assert "tensorflow" not in sys.modules


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("stories:2.0.0", r"has no version 2.0.0; it holds the versions 1.2.0"),
        ("stories@validation", r"no split 'validation'; there are: test, train"),
        ("stories#body", r"no text in field 'body'; there are: text, title"),
        ("stories#number", r"no text in field 'number'"),
        ("stories/small", r"has no prepared version; it does not exist"),
        ("nowhere", r"has no prepared version; it does not exist"),
        ("stories:1", r"is not tfds:NAME"),
        ("../stories", r"is not tfds:NAME"),
    ],
)
def test_a_dataset_that_is_not_there_is_refused_with_what_is(data_dir, name, said):
    with pytest.raises(WrongInput, match=said):
        sources.open_source(f"tfds:{name}", data_dir=str(data_dir))


def test_a_dataset_without_random_access_is_refused_with_the_command(data_dir, tmp_path):
    folder = tmp_path / "stories" / "1.2.0"
    folder.mkdir(parents=True)
    for path in (data_dir / "stories" / "1.2.0").glob("*.json"):
        (folder / path.name).write_text(path.read_text().replace("array_record", "tfrecord"))
    with pytest.raises(WrongInput, match=r"stored as tfrecord.*convert_format .*array_record"):
        sources.open_source("tfds:stories", data_dir=str(tmp_path))
    with pytest.raises(WrongInput, match="needs data_dir"):
        sources.open_source("tfds:stories")
    with pytest.raises(WrongInput, match=r"is a URL.*mount the bucket"):
        sources.open_source("tfds:stories", data_dir="gs://bucket/datasets")


def test_several_sources_make_one_corpus_on_any_number_of_machines(data_dir, tmp_path):
    for number in range(3):
        texts = [f"line {number} {n}" for n in range(50)]
        (tmp_path / f"{number}.jsonl.gz").write_bytes(gzip.compress(lines(texts)))
    (tmp_path / "a.txt").write_bytes(document("train", 99))
    given = {
        "source": (f"jsonl:{tmp_path}/*.gz", "tfds:stories", f"text:{tmp_path}/*.txt"),
        "data_dir": str(data_dir),
        "sequence_length": 8,
        "held_out": HELD_OUT,
    }
    alone = prepare(out=tmp_path / "alone", **given)
    assert alone.documents_read == 3 * 50 + 600 + 1
    parts = [tmp_path / "p0", tmp_path / "p1"]
    for number, part in enumerate(parts):
        prepare_part(out=part, shard=number, shards=2, **given)
    assert merge(parts=parts, out=tmp_path / "merged") == alone
    with Corpus.open(tmp_path / "merged") as corpus:
        corpus.verify()
