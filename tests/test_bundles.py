"""A bundle replays without the corpus, and only data is in it."""

from __future__ import annotations

import io
import json
import pathlib
import shutil
import tarfile

import numpy as np
import pytest

from palm_jax import train as training
from palm_jax.corpus.reader import Corpus
from palm_jax.errors import CannotDo, WrongInput
from palm_jax.record.folder import RunFolder
from palm_jax.replay import archives, branches, bundles
from palm_jax.replay import replay as replaying
from palm_jax.spikes import history


@pytest.fixture(scope="module")
def run(small, tmp_path_factory) -> RunFolder:
    path = tmp_path_factory.mktemp("bundles") / "run"
    training.train(small(), path)
    return RunFolder(path)


@pytest.fixture(scope="module")
def bundle(run, tmp_path_factory) -> pathlib.Path:
    with Corpus.open(run.config().data.corpus) as corpus:
        out = tmp_path_factory.mktemp("out") / "a" / "incident"
        return bundles.create(run, 6, 9, str(out), corpus=corpus)


def replay(path: pathlib.Path, start: int, stop: int):
    folder = RunFolder(path)
    with bundles.open_rows(folder, folder.config()) as rows:
        assert isinstance(rows, bundles.BundledRows)
        return replaying.replay(folder, start, stop, corpus=rows)


def test_bundle_replays_identically_without_the_corpus(bundle, tmp_path):
    shutil.copytree(bundle, tmp_path / "elsewhere")
    config = tmp_path / "elsewhere" / "config.yaml"
    lines = config.read_text().splitlines()
    config.write_text(
        "\n".join("  corpus: nowhere" if "corpus:" in line else line for line in lines) + "\n"
    )
    found = replay(tmp_path / "elsewhere", 6, 9)
    assert found.identical
    assert (found.compared_steps, found.from_checkpoint) == (3, 6)
    # Of the run's checkpoint 8, and of the state it was packed with.
    assert found.compared_digests == (6, 8)


def test_bundle_carries_just_the_rows_of_its_steps(bundle, run):
    with np.load(bundle / bundles.ROWS, allow_pickle=False) as arrays:
        ids = arrays["ids"]
        assert arrays["tokens"].dtype == np.uint16
    assert len(ids) == len(set(ids.tolist())) <= 3 * 16
    with pytest.raises(WrongInput, match="no record of step 9"):
        replay(bundle, 6, 10)


def test_one_flipped_token_in_a_bundle_shows(bundle, tmp_path):
    shutil.copytree(bundle, tmp_path / "copy")
    path = tmp_path / "copy" / bundles.ROWS
    with np.load(path, allow_pickle=False) as arrays:
        ids, tokens = arrays["ids"], arrays["tokens"].copy()
    tokens[5, 3] ^= 1
    np.savez(path, ids=ids, tokens=tokens)
    found = replay(tmp_path / "copy", 6, 9)
    assert not found.identical
    assert any("batch_digest" in row[2] for row in found.rows)


def test_truncated_rows_are_refused(bundle, tmp_path):
    shutil.copytree(bundle, tmp_path / "copy")
    path = tmp_path / "copy" / bundles.ROWS
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(CannotDo, match="is damaged"):
        replay(tmp_path / "copy", 6, 9)


def test_archive_holds_the_same_and_names_nobody(run, tmp_path):
    with Corpus.open(run.config().data.corpus) as corpus:
        out = bundles.create(run, 4, 6, str(tmp_path / "incident.tar.gz"), corpus=corpus)
    (tmp_path / "into").mkdir()
    folder = archives.unpacked(out, tmp_path / "into")
    assert folder.name == "incident"
    assert replay(folder, 4, 6).identical


@pytest.mark.slow
def test_branch_can_be_bundled(run, tmp_path):
    shutil.copytree(run.path, tmp_path / "run")
    there = RunFolder(tmp_path / "run")
    changes = branches.Changes(overrides=("schedule.peak=0.02",), exclude=((7, 8),))
    made, _ = branches.create_branch(there, 6, changes)
    training.train(made.config().model_copy(update={"steps": 9}), made.path, keep=False)
    with Corpus.open(there.config().data.corpus) as corpus:
        out = bundles.create(made, 7, 9, str(tmp_path / "out"), corpus=corpus)
    assert replay(out, 7, 9).identical
    # It departs from nowhere: what the branch departed from is not in it.
    assert [segment.start_step for _, segment, _ in history.chain(RunFolder(out))] == [7]


def test_existing_place_and_missing_steps_are_refused(run, tmp_path):
    with Corpus.open(run.config().data.corpus) as corpus:
        with pytest.raises(WrongInput, match="exists"):
            bundles.create(run, 4, 6, str(tmp_path), corpus=corpus)
        with pytest.raises(WrongInput, match="no record of step 12"):
            bundles.create(run, 10, 14, str(tmp_path / "new"), corpus=corpus)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["../outside", "/absolute", "link"])
def test_archive_that_reaches_outside_is_refused(tmp_path, name):
    archive = tmp_path / "evil.tar.gz"
    with tarfile.open(archive, "w:gz") as file:
        member = tarfile.TarInfo(name)
        if name == "link":
            member.type, member.linkname = tarfile.SYMTYPE, "../../outside"
        else:
            member.size = 1
        file.addfile(member, io.BytesIO(b"x"))
    into = tmp_path / "into"
    into.mkdir()
    with pytest.raises(WrongInput, match="is not a bundle"):
        archives.unpacked(archive, into)
    assert not (tmp_path / "outside").exists()


def test_file_that_is_no_archive_is_refused(tmp_path):
    (tmp_path / "x.tar.gz").write_text(json.dumps({"not": "an archive"}))
    (tmp_path / "into").mkdir()
    with pytest.raises(WrongInput, match="is not a bundle"):
        archives.unpacked(tmp_path / "x.tar.gz", tmp_path / "into")
