"""Preparing: no token lost or repeated, one result whatever the machine, all or nothing."""

from __future__ import annotations

import fcntl
import glob
import json
import os
import pathlib
import resource
import signal
import subprocess
import sys
import tempfile

import numpy as np
import pytest
from corpora import HELD_OUT, document, make, write_documents
from hypothesis import given, settings
from hypothesis import strategies as st

from palm_jax.corpus import manifest as manifests
from palm_jax.corpus.prepare import prepare
from palm_jax.corpus.reader import Corpus
from palm_jax.errors import CannotDo, WrongInput

END = 256
BASE = {"train": document("train", 90), "held_out": document("held_out", 40)}


def rows_of(corpus: Corpus, split: str) -> np.ndarray:
    return corpus.read(split, range(corpus.num_sequences(split)))


def kept_stream(corpus: Corpus, split: str) -> list[int]:
    """The stream put together from the records, which must share their border tokens."""
    rows = rows_of(corpus, split)
    assert (rows[1:, 0] == rows[:-1, -1]).all()
    return [int(rows[0, 0]), *rows[:, 1:].reshape(-1).tolist()]


def names_of(folder: pathlib.Path, split: str) -> list[str]:
    lines = (folder / f"{split}.names.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def files_in(folder: pathlib.Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def check_every_token_is_a_target_once(folder: pathlib.Path, documents: dict[str, bytes]) -> None:
    corpus = Corpus.open(folder / "corpus")
    seen = []
    for split, info in corpus.manifest.splits.items():
        names = names_of(folder / "corpus", split)
        seen += names
        whole = [END] + [token for name in names for token in (*documents[name], END)]
        kept = kept_stream(corpus, split)
        assert kept == whole[: len(kept)]
        assert len(whole) - len(kept) == info.tail_tokens < corpus.sequence_length
        assert info.tokens == len(whole) - 1
        assert info.target_bytes == sum(token != END for token in kept[1:])
        assert info.bytes == sum(len(documents[name]) for name in names)
        assert whole[1:].count(END) == info.documents == len(names)
    assert sorted(seen) == sorted(name for name, content in documents.items() if content)
    corpus.verify()


@given(st.lists(st.binary(max_size=60), max_size=6), st.integers(1, 12), st.integers(0, 3))
@settings(max_examples=25)
def test_every_token_of_every_document_is_a_target_exactly_once(contents, length, seed):
    documents = {f"extra-{i}": content for i, content in enumerate(contents)} | BASE
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        make(folder, documents, sequence_length=length, seed=seed, shard_bytes=100)
        check_every_token_is_a_target_once(folder, documents)


def test_long_documents_cross_the_blocks_that_are_cut_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr("palm_jax.corpus.packing._BLOCK_TOKENS", 13)
    documents = BASE | {"long": bytes(range(256)) * 2, "short": b"x"}
    make(tmp_path, documents)
    check_every_token_is_a_target_once(tmp_path, documents)


def test_empty_blank_and_long_documents_are_counted_and_none_is_lost(tmp_path):
    documents = {"0": b"", "1": b" ", "2": b"some text", "3": b"long " * 8} | BASE
    made = make(tmp_path, documents)
    check_every_token_is_a_target_once(tmp_path, documents)
    assert (made.documents_read, made.empty_documents) == (6, 1)
    assert sum(split.documents for split in made.splits.values()) == 5
    assert made.longest_document_bytes == 90


def test_text_that_spells_a_control_token_stays_text(tmp_path):
    text = b"<|end of document|> <eod> \\u0100 </s> " + bytes([0, 255])
    documents = {"marker": text} | BASE
    make(tmp_path, documents, sequence_length=1)  # no tail is left out
    corpus = Corpus.open(tmp_path / "corpus")
    back = []
    for split, info in corpus.manifest.splits.items():
        stream = kept_stream(corpus, split)
        assert stream[1:].count(END) == info.documents
        parts = " ".join(map(str, stream[1:-1])).split(f" {END} ")
        back += [bytes(map(int, part.split())) for part in parts]
    assert sorted(back) == sorted(documents.values())


def test_invalid_utf8_is_kept_byte_for_byte_and_counted(tmp_path):
    documents = {"latin1": b"caf\xe9", "utf8": "café".encode(), "half": b"\xf0\x9f"} | BASE
    made = make(tmp_path, documents)
    assert made.invalid_utf8_documents == 2
    check_every_token_is_a_target_once(tmp_path, documents)


def many_documents() -> dict[str, bytes]:
    return {f"{i:02d}": f"document {i} ".encode() * (1 + i % 3) for i in range(40)}


def test_documents_of_one_content_are_in_one_split(tmp_path):
    copies = {f"copy of {name}": content for name, content in many_documents().items()}
    made = make(tmp_path, many_documents() | copies)
    split_by_name = {
        name: split for split in manifests.SPLITS for name in names_of(tmp_path / "corpus", split)
    }
    assert all(split_by_name[name] == split_by_name[f"copy of {name}"] for name in many_documents())
    assert sum(split.distinct_documents for split in made.splits.values()) == 40
    assert sum(split.documents for split in made.splits.values()) == 80
    assert made.documents_in_both_splits == 0


def test_the_seed_changes_the_order_and_not_the_split(tmp_path):
    names = []
    for seed in (0, 1):
        make(tmp_path, many_documents(), seed=seed, out=f"seed {seed}")
        names.append(names_of(tmp_path / f"seed {seed}", "train"))
    assert names[0] != names[1]
    assert sorted(names[0]) == sorted(names[1])
    assert names[0] != sorted(names[0])


def test_a_larger_fraction_holds_out_the_same_documents_and_more(tmp_path):
    held_out = []
    for fraction in (0.1, 0.2, 0.6):
        make(tmp_path, many_documents(), held_out=fraction, out=f"at {fraction}")
        held_out.append(set(names_of(tmp_path / f"at {fraction}", "held_out")))
    assert held_out[0] < held_out[1] < held_out[2]
    assert 15 <= len(held_out[2]) <= 33  # 24 of 40 expected, 3.1 the standard deviation


def test_any_number_of_workers_makes_the_same_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr("palm_jax.corpus.tokenising._GROUP_BYTES", 20)
    # Only the names tell copies apart, so they show the order in which documents came.
    copies = {f"{i:02d} copy": b"the same again" for i in range(40)}
    documents = many_documents() | copies
    made = [make(tmp_path, documents, workers=n, out=f"by {n}") for n in (1, 3)]
    assert made[0] == made[1]
    assert files_in(tmp_path / "by 1") == files_in(tmp_path / "by 3")


def test_the_order_in_which_the_file_system_lists_does_not_matter(tmp_path, monkeypatch):
    straight = make(tmp_path, many_documents(), out="straight")
    found = sorted(glob.glob(f"{tmp_path}/documents/*"), reverse=True)
    monkeypatch.setattr(glob, "iglob", lambda *a, **k: iter(found))
    assert make(tmp_path, many_documents(), out="reversed") == straight
    assert files_in(tmp_path / "straight") == files_in(tmp_path / "reversed")


def test_the_digest_knows_no_paths_names_or_shards_but_every_token(tmp_path):
    renamed = {f"x{name[::-1]}": content for name, content in many_documents().items()}
    first = make(tmp_path / "a", many_documents())
    assert make(tmp_path / "b", renamed, shard_bytes=1).digest == first.digest
    assert make(tmp_path / "d", many_documents(), seed=1).digest != first.digest
    assert make(tmp_path / "b", renamed, sequence_length=4, out="e").digest != first.digest


@pytest.mark.parametrize("split", ["train", "held_out"])
def test_another_document_in_either_split_changes_the_digest(tmp_path, split):
    first = make(tmp_path / "a", BASE)
    other = BASE | {split: document(split, len(BASE[split]), salt=1)}
    assert make(tmp_path / "b", other).digest != first.digest


def test_a_stdlib_corpus_says_nothing_about_the_machine(tmp_path):
    made = prepare(source="stdlib", out=tmp_path / "corpus", sequence_length=64, held_out=0.02)
    for name, content in files_in(tmp_path / "corpus").items():
        if not name.endswith(".arrayrecord"):
            assert sys.prefix.encode() not in content
            assert str(tmp_path).encode() not in content
    assert 2.5 < made.bigram_bits_per_byte < 5  # program text; 8 would be noise


def test_too_few_tokens_are_refused_with_both_counts(tmp_path):
    with pytest.raises(WrongInput, match=r"has 6 tokens.* 18 ") as refusal:  # END a b c d END
        make(tmp_path, {"tiny": b"abcd"})
    assert "sequence_length=8" in str(refusal.value)
    assert os.listdir(tmp_path) == ["documents"]


def test_a_split_without_a_whole_sequence_is_refused_with_both_counts(tmp_path):
    small = {"train": document("train", 90), "held_out": document("held_out", 4)}
    with pytest.raises(WrongInput, match=r"held_out split has 6 tokens.* needs 9"):
        make(tmp_path, small)
    # One byte below and exactly at one sequence: END, 7 bytes, END are 9 tokens.
    with pytest.raises(WrongInput, match=r"held_out split has 8 tokens.* needs 9"):
        make(tmp_path / "less", BASE | {"held_out": document("held_out", 6)})
    made = make(tmp_path / "enough", BASE | {"held_out": document("held_out", 7)})
    assert (made.splits["held_out"].sequences, made.splits["held_out"].tail_tokens) == (1, 0)


def test_an_empty_split_is_refused_with_the_remedy(tmp_path):
    with pytest.raises(WrongInput, match=r"held_out split has none of the 1 .* raise held_out"):
        make(tmp_path / "a", {"train": BASE["train"]})
    with pytest.raises(WrongInput, match=r"train split has none of the 1 .* lower held_out"):
        make(tmp_path / "b", {"held_out": BASE["held_out"]})
    with pytest.raises(WrongInput, match=r"no document with any text \(1 empty\)"):
        make(tmp_path / "c", {"nothing": b""})


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("sequence_length", 0),
        ("sequence_length", True),
        ("seed", -1),
        ("held_out", 0.0),
        ("held_out", 1.0),
        ("held_out", float("nan")),
        ("workers", 0),
        ("shard_bytes", 0),
    ],
)
def test_a_setting_out_of_range_is_refused_by_name_and_value(tmp_path, setting, value):
    with pytest.raises(WrongInput, match=f"{setting}={value} must be"):
        make(tmp_path, BASE, **{setting: value})


@pytest.mark.parametrize(("stage", "kept"), [("reading", []), ("writing", [".corpus.preparing"])])
def test_an_error_on_the_way_leaves_nothing_but_what_can_be_gone_on_from(tmp_path, stage, kept):
    def fail(now, done, total):
        if now == stage:
            raise RuntimeError(f"failed while {stage}")

    with pytest.raises(RuntimeError, match=f"failed while {stage}"):
        make(tmp_path, BASE, progress=fail)
    assert sorted(os.listdir(tmp_path)) == [*kept, "documents"]
    made = make(tmp_path, BASE)
    assert sorted(os.listdir(tmp_path)) == ["corpus", "documents"]
    make(tmp_path, BASE, out="straight")
    assert Corpus.open(tmp_path / "straight").manifest == made


def test_a_killed_prepare_leaves_no_corpus_and_the_next_clears_up(tmp_path):
    source = write_documents(tmp_path / "documents", BASE)
    program = f"""
import time
from palm_jax.corpus.prepare import prepare
def wait(stage, done, total):
    if stage == "writing" and done == total:
        print("written", flush=True)
        time.sleep(60)
prepare(source={source!r}, out={str(tmp_path / "corpus")!r}, sequence_length=8,
        held_out={HELD_OUT}, progress=wait, shard_bytes=1)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"written\n"
        with pytest.raises(CannotDo, match="another process is preparing"):
            make(tmp_path, BASE)
        process.send_signal(signal.SIGKILL)
    assert sorted(os.listdir(tmp_path)) == [".corpus.preparing", "documents"]
    assert any((tmp_path / ".corpus.preparing").iterdir())
    with pytest.raises(WrongInput, match="palm-jax data prepare"):
        Corpus.open(tmp_path / "corpus")
    made = make(tmp_path, BASE)
    assert sorted(os.listdir(tmp_path)) == ["corpus", "documents"]
    assert Corpus.open(tmp_path / "corpus").manifest == made
    expected = {manifests.FILE_NAME}
    for split in made.splits.values():
        expected |= {shard.file for shard in split.shards}
        expected |= {split.offsets.file, split.names.file, split.digests.file}
    assert set(os.listdir(tmp_path / "corpus")) == expected


def test_two_at_once_for_one_folder_are_refused(tmp_path):
    place = tmp_path / ".corpus.preparing"
    place.mkdir()
    handle = os.open(place, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    with pytest.raises(CannotDo, match="another process is preparing"):
        make(tmp_path, BASE)
    os.close(handle)
    make(tmp_path, BASE)


def test_preparing_the_same_again_changes_nothing(tmp_path):
    first = make(tmp_path, BASE)
    times = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "corpus").iterdir()}
    assert make(tmp_path, BASE, shard_bytes=50) == first
    assert times == {path.name: path.stat().st_mtime_ns for path in (tmp_path / "corpus").iterdir()}
    assert sorted(os.listdir(tmp_path)) == ["corpus", "documents"]


def test_another_corpus_is_never_overwritten(tmp_path):
    make(tmp_path, BASE)
    before = files_in(tmp_path / "corpus")
    with pytest.raises(WrongInput, match=r"corpus holds a corpus made with seed=0, not 7"):
        make(tmp_path, BASE, seed=7)
    with pytest.raises(WrongInput, match="made from other documents"):
        make(tmp_path, BASE | {"train": document("train", 90, salt=1)})
    assert files_in(tmp_path / "corpus") == before


def test_a_folder_that_is_no_corpus_is_left_alone_but_an_empty_one_is_filled(tmp_path):
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "thesis.txt").write_text("mine")
    with pytest.raises(WrongInput, match="exists and is not a corpus"):
        make(tmp_path, BASE)
    assert files_in(tmp_path / "corpus") == {"thesis.txt": b"mine"}
    (tmp_path / "empty").mkdir()
    make(tmp_path, BASE, out="empty")
    Corpus.open(tmp_path / "empty").verify()


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CannotDo, match=r"out=.*file/corpus"):
        make(tmp_path, BASE, out="file/corpus")


@pytest.mark.parametrize(
    ("most", "kept"), [(100, []), (20_000, [".corpus.preparing"])]
)  # bytes: the spool fails, then a shard
def test_a_disk_that_is_full_is_an_error_and_loses_no_finished_work(tmp_path, most, kept):
    source = write_documents(tmp_path / "documents", BASE)
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, old[1]))
    try:
        with pytest.raises(CannotDo, match=r"cannot write .*corpus.*File too large"):
            prepare(source=source, out=tmp_path / "corpus", sequence_length=8, held_out=HELD_OUT)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert sorted(os.listdir(tmp_path)) == [*kept, "documents"]


def test_a_bucket_is_refused_and_no_folder_named_after_it_appears(tmp_path, monkeypatch):
    source = write_documents(tmp_path / "documents", BASE)
    monkeypatch.chdir(tmp_path)
    for out in ("gs://bucket/x", pathlib.Path("gs://bucket/x")):
        with pytest.raises(WrongInput, match="URL"):
            prepare(source=source, out=out, sequence_length=8, held_out=HELD_OUT)
    assert os.listdir(tmp_path) == ["documents"]


def test_relative_folders_with_spaces_and_accents_work(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_documents(tmp_path / "é è", BASE)
    prepare(source="text:é è/*", out="runs/a b ü", sequence_length=8, held_out=HELD_OUT)
    corpus = Corpus.open("runs/a b ü")
    monkeypatch.chdir("/")
    assert corpus.documents("train", 0)[0].name == "train"
    corpus.verify()


def test_progress_runs_up_to_its_total(tmp_path):
    told = []
    made = make(tmp_path, BASE, progress=lambda *report: told.append(report))
    for stage, total in (
        ("reading", sum(map(len, BASE.values()))),
        ("writing", sum(split.sequences for split in made.splits.values())),
    ):
        done = [report[1] for report in told if report[0] == stage]
        assert done == sorted(done)
        assert {report[2] for report in told if report[0] == stage} == {total}
        assert done[-1] == total
