"""Several corpora read as one, and batches of a mixture of them."""

from __future__ import annotations

import hashlib
import json
import pathlib
import shutil

import numpy as np
import pytest
from corpus.corpora import document, make, with_sequences

from palm_jax import config, data, stream
from palm_jax.config import Ramp
from palm_jax.corpus import corpora, joint, manifest
from palm_jax.corpus.corpora import Corpora
from palm_jax.errors import WrongInput

SIZES = {"books": 7, "code": 3, "web": 5}
RAMP = Ramp(starts=(0, 2), sizes=(4, 6))


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("corpora")
    for name, size in SIZES.items():
        with with_sequences(folder / name, size, shard_bytes=60):
            pass
    return {name: str(folder / name / "corpus") for name in SIZES}


@pytest.fixture(scope="module")
def opened(folders):
    with Corpora.open(folders) as opened:
        yield opened


def mixture_of(folders, *stages, starts=(0,)) -> config.Mixture:
    return config.Mixture(corpora=folders, starts=starts, weights=stages)


def test_ids_run_on_from_corpus_to_corpus(opened):
    assert opened.num_sequences("train") == 15
    assert joint.id_ranges(opened.manifest, "train") == {
        "books": range(7),
        "code": range(7, 10),
        "web": range(10, 15),
    }
    whole = np.concatenate([c.read("train", range(SIZES[n])) for n, c in opened.corpora.items()])
    for ids in (range(15), [14, 0, 7, 9, 7], []):
        assert (opened.read("train", ids) == whole[list(ids)]).all()
    assert opened.place("train", 9) == ("code", 2)
    assert opened.num_sequences("held_out") == 3
    assert opened.read("held_out", range(3)).shape == (3, 9)


def test_documents_say_which_corpus_they_are_of(opened):
    (span,) = opened.documents("train", 8)
    (own,) = opened.corpora["code"].documents("train", 1)
    assert span.name == f"code: {own.name}"
    assert (span.start, span.stop, span.offset) == (own.start, own.stop, own.offset)
    tokens = opened.read("train", [8])[0]
    assert opened.decode(tokens) == opened.corpora["code"].decode(tokens)
    opened.verify()


def test_what_is_not_there_is_refused_with_its_corpus(folders, opened, tmp_path):
    for use in (lambda: opened.read("train", [15]), lambda: opened.documents("train", -1)):
        with pytest.raises(WrongInput, match="does not exist: books, code, web have 15, from 0"):
            use()
    with pytest.raises(WrongInput, match="no split 'test'"):
        opened.read("test", [0])
    with pytest.raises(WrongInput, match=r"data\.mixture\.corpora\.code: .*is not a folder"):
        Corpora.open({**folders, "code": str(tmp_path / "gone")})
    copy = tmp_path / "web"
    shutil.copytree(folders["web"], copy)
    (copy / "train.names.jsonl").write_text("")
    with Corpora.open({**folders, "web": str(copy)}) as damaged:
        with pytest.raises(WrongInput, match=r"data\.mixture\.corpora\.web: .*not what was prep"):
            damaged.verify()
        with pytest.raises(WrongInput, match=r"data\.mixture\.corpora\.web: "):
            damaged.documents("train", 12)


def test_corpora_that_are_not_alike_are_refused_with_both_values(folders, tmp_path):
    contents = {"train": document("train", 40), "held_out": document("held_out", 40)}
    make(tmp_path, contents, sequence_length=16)
    said = "books has sequence_length=8, and long has sequence_length=16; prepare them alike"
    wanted = {"books": folders["books"], "long": str(tmp_path / "corpus")}
    with pytest.raises(WrongInput, match=f"data.mixture: {said}"):
        Corpora.open(wanted)
    settings = config.Data(ramp=RAMP, mixture=mixture_of(wanted, {"books": 1, "long": 1}))
    with pytest.raises(WrongInput, match=said):
        corpora.contents(settings)


def test_the_manifest_reads_like_that_of_one_corpus(folders, opened, tmp_path):
    found = opened.manifest
    parts = [manifest.read(pathlib.Path(folder)) for folder in folders.values()]
    for split in manifest.SPLITS:
        for total in ("documents", "bytes", "tokens", "sequences", "target_bytes"):
            wanted = sum(getattr(part.splits[split], total) for part in parts)
            assert getattr(found.splits[split], total) == wanted
    assert (found.vocabulary_size, found.end_of_document, found.sequence_length) == (257, 256, 8)
    sizes = [part.splits["held_out"].target_bytes for part in parts]
    bits = [part.bigram_bits_per_byte for part in parts]
    assert found.bigram_bits_per_byte == pytest.approx(np.average(bits, weights=sizes))
    settings = config.Data(ramp=RAMP, mixture=mixture_of(folders, dict.fromkeys(folders, 1)))
    assert corpora.contents(settings) == found
    # In a run's folder.
    (tmp_path / manifest.FILE_NAME).write_text(found.model_dump_json())
    assert joint.read(tmp_path) == found
    (tmp_path / manifest.FILE_NAME).write_text(parts[0].model_dump_json())
    assert joint.read(tmp_path) == parts[0]


def test_the_digest_is_of_names_corpora_and_their_order(folders, opened):
    named = [[name, corpus.manifest.digest] for name, corpus in opened.corpora.items()]
    assert opened.manifest.digest == hashlib.sha256(json.dumps(named).encode()).hexdigest()
    turned = dict(reversed(folders.items()))
    renamed = {"novels": folders["books"], "code": folders["code"], "web": folders["web"]}
    digests = {opened.manifest.digest}
    for other in (turned, renamed):
        with Corpora.open(other) as again:
            digests.add(again.manifest.digest)
    assert len(digests) == 3


def test_a_tampered_joint_manifest_is_refused(opened, tmp_path):
    path = tmp_path / manifest.FILE_NAME
    for change in ({"digest": "0" * 64}, {"corpora": {}}, {"more": 1}, {"corpora": [1]}):
        path.write_text(json.dumps(opened.manifest.model_dump(mode="json") | change))
        with pytest.raises(WrongInput, match=r"manifest\.json is not a manifest"):
            joint.read(tmp_path)


# Batches


def test_each_corpus_has_epochs_and_an_order_of_its_own(folders, opened):
    mixture = mixture_of(folders, {"books": 2, "code": 3, "web": 1})
    ranges = joint.id_ranges(opened.manifest, "train")
    places = [p for step in range(8) for p in stream.Stream(RAMP, mixture).places(step)]
    ids = {seed: data.ids_at(seed, places, ranges).tolist() for seed in (0, 1)}
    for name, own in ranges.items():
        drawn = [
            [i for i, (corpus, _) in zip(ids[seed], places, strict=True) if corpus == name]
            for seed in (0, 1)
        ]
        assert drawn[0] != drawn[1]
        for order in drawn:
            # The small corpus is read over and over, whatever the others do.
            epochs = [order[i : i + len(own)] for i in range(0, len(order), len(own))]
            assert len(epochs) == {"books": 3, "code": 8, "web": 2}[name]
            assert all(sorted(epoch) == list(own) for epoch in epochs[:-1])
            assert len(set(map(tuple, epochs))) > 1


def test_corpora_of_one_size_are_not_permuted_alike():
    orders = {
        tuple(data.sequence_ids(0, range(100), 100, name).tolist())
        for name in (None, "books", "code", "0")
    }
    assert len(orders) == 4
    # A change here would change the data of every run of a mixture there is.
    pinned = [8, 2, 9, 0, 7, 3, 5, 1, 6, 4]
    assert data.sequence_ids(0, range(10), 10, "books").tolist() == pinned


def test_a_batch_is_read_from_where_its_places_say(folders, opened):
    stages = {"books": 1, "code": 1, "web": 0}, {"books": 0.5, "code": 0.1, "web": 0.4}
    mixture = mixture_of(folders, *stages, starts=(0, 3))
    excluded = ((2, 4, "books"), (0, 9, "web"), (5, 6, "code"))
    source = data.BatchSource(opened, 5, RAMP, 9, excluded, mixture=mixture)
    fed = stream.Stream(RAMP, mixture, excluded)
    for batch in data.batches(source, 0, 9, threads=2, prefetch=3):
        wanted = []
        for name, position in fed.places(batch.step):
            corpus = opened.corpora[name]
            (own,) = data.sequence_ids(5, [position], SIZES[name], name)
            wanted.append(corpus.read("train", [own])[0])
        assert (batch.tokens == wanted).all()
        assert batch.first_position == sum(fed.next_positions(batch.step).values())
        assert (opened.read("train", batch.sequence_ids) == wanted).all()
        halves = [
            data.BatchSource(
                opened,
                5,
                RAMP,
                9,
                excluded,
                mixture=mixture,
                rows=lambda n, h=h: np.arange(n)[h::2],
            )[batch.step].digest
            for h in (0, 1)
        ]
        assert data.add_digests(halves) == batch.digest
    assert [name for name, _ in fed.places(0)] == ["books", "code"] * 2


def test_one_corpus_has_the_batches_that_it_had_before_there_were_mixtures(tmp_path):
    ramp, excluded = Ramp(starts=(0, 3, 5), sizes=(2, 4, 8)), ((5, 9), (30, 31))
    with with_sequences(tmp_path, 10) as corpus:
        digests = [data.batch(corpus, 3, step, ramp, excluded).digest for step in range(7)]
    assert digests == [
        *("f8f41ddbebd35f99", "53d5ecd3be3aa715", "999d32fcf455dbf7", "d37c2d63af3d43b5"),
        *("da75fa842a9c2b5b", "8a795b677565cf90", "50b2541e5718da3a"),
    ]
