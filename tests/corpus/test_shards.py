"""Several machines, little memory, a kill at any point: one corpus, byte for byte."""

from __future__ import annotations

import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile

import hypothesis.strategies as st
import pytest
from corpora import HELD_OUT, document, write_documents
from hypothesis import given, settings

from palm_jax.corpus import manifest, spool, tokenising, vocabulary, workers
from palm_jax.corpus.prepare import merge, prepare, prepare_part
from palm_jax.corpus.reader import Corpus
from palm_jax.corpus.spool import Record
from palm_jax.errors import CannotDo, WrongInput

BASE = {"train": document("train", 90), "held_out": document("held_out", 40)}
COPY = document("held_out", 4)


def documents(count: int) -> dict[str, bytes]:
    texts = {f"{i:02d}": f"document {i % 30} ".encode() * (1 + i % 3) for i in range(count)}
    return BASE | texts | {"empty": b"", "latin1": b"caf\xe9"}


def options(source: str | tuple[str, ...], **other: object) -> dict[str, object]:
    return {"source": source, "sequence_length": 8, "held_out": HELD_OUT} | other


def files_in(folder: pathlib.Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@settings(max_examples=12)
@given(
    st.lists(st.binary(max_size=30), max_size=12),
    st.integers(1, 4),
    st.sampled_from([1, 60, 10**6]),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_any_number_of_machines_and_any_memory_make_the_same_bytes(
    contents, machines, memory, drop, rng
):
    texts = {f"extra-{i}": content for i, content in enumerate(contents)} | BASE
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        given = options(write_documents(folder / "documents", texts), drop_duplicates=drop)
        prepare(out=folder / "alone", **given)
        parts = [folder / f"part {i}" for i in range(machines)]
        for number, part in enumerate(parts):
            prepare_part(out=part, shard=number, shards=machines, memory_bytes=memory, **given)
        rng.shuffle(parts)
        made = merge(parts=parts, out=folder / "merged", memory_bytes=memory)
        assert files_in(folder / "merged") == files_in(folder / "alone")
        with Corpus.open(folder / "merged") as corpus:
            assert corpus.manifest == made
            corpus.verify()


@settings(max_examples=25)
@given(
    st.lists(st.tuples(st.binary(min_size=16, max_size=16), st.integers(0, 3)), max_size=40),
    st.integers(1, 400),
)
def test_a_spool_gives_back_its_records_sorted(keys, memory):
    keys += [(b"\x00" * 16, 1), (b"\x00" * 15 + b"\x01", 0), (b"\x00" * 16, 0)]
    records = [
        Record(key, unit, number, key[::-1], 3, 1, f"é {number}", b"\x01\x02")
        for number, (key, unit) in enumerate(keys)
    ]
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        writer = spool.Writer(folder, journal(), memory)
        for record in records:
            writer.add("train", record)
            if writer.is_full:
                writer.commit(writer.journal)
        writer.commit(writer.journal)
        found = list(spool.in_order([folder], "train", folder, memory))
        assert [r._replace(tokens=bytes(r.tokens)) for r in found] == sorted(
            records, key=lambda r: (r.key, r.unit, r.number)
        )
        assert not list(folder.glob("*.divided"))


def journal(**entries: object) -> spool.Journal:
    tokenizer = manifest.Tokenizer(kind="bytes", vocabulary_size=257, end_of_document=256)
    recipe = spool.Recipe(
        source=("text:x",),
        document_separator=None,
        sequence_length=8,
        seed=0,
        held_out=0.5,
        drop_duplicates=False,
        tokenizer=tokenizer,
    )
    return spool.Journal(recipe=recipe, asked="bytes", units=1, listing="", **entries)


def test_memory_holds_no_more_than_it_may(tmp_path, monkeypatch):
    writer = spool.Writer(tmp_path, journal())
    for number in range(3000):
        key = tokenising.content_digest(str(number).encode())
        writer.add("train", Record(key, 0, number, key, 9, 50, "name", bytes(100)))
    writer.commit(writer.journal)
    largest = 0
    original = spool._read

    def read(path):
        nonlocal largest
        largest = max(largest, path.stat().st_size)
        return original(path)

    monkeypatch.setattr(spool, "_read", read)
    assert len(list(spool.in_order([tmp_path], "train", tmp_path, 700))) == 3000
    assert largest <= 700


def test_copies_are_counted_and_dropped_where_asked(tmp_path):
    texts = documents(60)  # 30 contents at most, each twice
    source = write_documents(tmp_path / "documents", texts)
    kept = prepare(out=tmp_path / "kept", **options(source))
    contents = {content for content in texts.values() if content}
    assert sum(s.documents for s in kept.splits.values()) == 63
    assert sum(s.distinct_documents for s in kept.splits.values()) == len(contents)
    dropped = prepare(out=tmp_path / "dropped", **options(source, drop_duplicates=True))
    assert dropped.duplicates_dropped == 63 - len(contents)
    assert sum(s.documents for s in dropped.splits.values()) == len(contents)
    with Corpus.open(tmp_path / "dropped") as corpus:
        index = corpus.index("train")
        names = [index.name(i) for i in range(corpus.manifest.splits["train"].documents)]
        first = {}
        for name, content in sorted(texts.items()):
            first.setdefault(content, name)
        assert set(names) <= set(first.values())
    # Copies alone are no split.
    only = write_documents(tmp_path / "copies", {f"{i}": COPY for i in range(9)} | BASE)
    one = options(only, drop_duplicates=True, sequence_length=50)
    with pytest.raises(WrongInput, match="no whole sequence once copies are dropped"):
        prepare(out=tmp_path / "x", **one)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda parts: parts[:2], r"part 2/3 is missing"),
        (lambda parts: [*parts, parts[0]], r"part 0/3 is there twice"),
        (lambda parts: [], "no parts"),
        (lambda parts: [parts[0].parent], "is no part of a corpus"),
    ],
)
def test_parts_that_are_not_one_of_each_are_refused(tmp_path, change, said):
    given = options(write_documents(tmp_path / "documents", documents(20)))
    parts = [tmp_path / f"{i}" for i in range(3)]
    for number, part in enumerate(parts):
        prepare_part(out=part, shard=number, shards=3, **given)
    with pytest.raises(WrongInput, match=said):
        merge(parts=change(parts), out=tmp_path / "corpus")
    assert not (tmp_path / "corpus").exists()


def test_parts_of_different_corpora_are_refused_by_setting(tmp_path):
    given = options(write_documents(tmp_path / "documents", documents(20)))
    prepare_part(out=tmp_path / "0", shard=0, shards=2, **given)
    prepare_part(out=tmp_path / "1", shard=1, shards=2, **given | {"seed": 4})
    with pytest.raises(WrongInput, match=r"1 was made with seed=4, but .*0 with 0"):
        merge(parts=[tmp_path / "0", tmp_path / "1"], out=tmp_path / "corpus")


def test_a_damaged_part_is_named(tmp_path):
    given = options(write_documents(tmp_path / "documents", documents(20)))
    for number in range(2):
        prepare_part(out=tmp_path / f"{number}", shard=number, shards=2, **given)
    (bucket, *_) = sorted((tmp_path / "1").glob("*.bucket"))
    content = bytearray(bucket.read_bytes())
    content[-1] ^= 1
    bucket.write_bytes(content)
    parts = [tmp_path / "0", tmp_path / "1"]
    with pytest.raises(CannotDo, match=f"{bucket.name} is damaged"):
        merge(parts=parts, out=tmp_path / "corpus")
    bucket.write_bytes(content[:-5])
    with pytest.raises(WrongInput, match=rf"{bucket.name} has .* bytes, its journal says"):
        merge(parts=parts, out=tmp_path / "corpus")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "documents"]


def test_preparing_a_part_or_merging_again_changes_nothing(tmp_path):
    given = options(write_documents(tmp_path / "documents", documents(20)))
    parts = [tmp_path / "0", tmp_path / "1"]
    for number, part in enumerate(parts):
        first = prepare_part(out=part, shard=number, shards=2, **given)
        assert prepare_part(out=part, shard=number, shards=2, **given) == first
    made = merge(parts=parts, out=tmp_path / "corpus")
    assert merge(parts=parts, out=tmp_path / "corpus") == made
    with pytest.raises(WrongInput, match="is not this part of this corpus"):
        prepare_part(out=parts[0], shard=1, shards=2, **given)
    with pytest.raises(WrongInput, match="shard=2/2 does not exist"):
        prepare_part(out=parts[0], shard=2, shards=2, **given)


KILLED = """
import sys
from palm_jax.corpus import prepare, spool, tokenising
tokenising._GROUP_BYTES = 40
commit = spool.Writer.commit
commits = 0
def counted(self, journal):
    global commits
    commit(self, journal)
    commits += 1
    if commits == {after}:
        self.add("train", spool.Record(b"torn" * 4, 0, 0, b"x" * 16, 1, 1, "torn", b"xx"))
        for name, pieces in self._pending.items():
            with (self._folder / name).open("ab") as file:
                file.writelines(pieces)
        print("now", flush=True)
        sys.stdin.read()
spool.Writer.commit = counted
prepare.{call}
"""


@pytest.mark.parametrize("after", [1, 3])
@pytest.mark.parametrize("whole", [True, False])
def test_a_killed_preparation_goes_on_where_it_was(tmp_path, monkeypatch, after, whole):
    texts = documents(40)
    given = options(write_documents(tmp_path / "documents", texts), memory_bytes=200)
    prepare(out=tmp_path / "straight", **given)
    split = {} if whole else {"shard": 1, "shards": 2}
    call = ("prepare" if whole else "prepare_part") + f"(out='out', **{given | split!r})"
    program = KILLED.format(after=after, call=call)
    with subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout.readline() == b"now\n"
        process.send_signal(signal.SIGKILL)
    tokenised = []
    original = workers._tokenise

    def watched(group, tokenizer):
        tokenised.extend(place.document.name for place in group)
        return original(group, tokenizer)

    monkeypatch.setattr(workers, "_tokenise", watched)
    if whole:
        prepare(out=tmp_path / "out", **given)
        assert files_in(tmp_path / "out") == files_in(tmp_path / "straight")
        assert 0 < len(tokenised) < len(texts)
    else:
        prepare_part(out=tmp_path / "out", **given | split)
        assert 0 < len(tokenised) < len(texts) / 2
        prepare_part(out=tmp_path / "other", **given | split | {"shard": 0})
        merge(parts=[tmp_path / "out", tmp_path / "other"], out=tmp_path / "merged")
        assert files_in(tmp_path / "merged") == files_in(tmp_path / "straight")
    assert not (tmp_path / ".out.preparing").exists()


def test_a_killed_merge_leaves_no_corpus_and_the_next_clears_up(tmp_path):
    given = options(write_documents(tmp_path / "documents", documents(40)))
    parts = [tmp_path / "0", tmp_path / "1"]
    for number, part in enumerate(parts):
        prepare_part(out=part, shard=number, shards=2, **given)
    program = f"""
import sys
from palm_jax.corpus.prepare import merge
def wait(stage, done, total):
    print("now", flush=True)
    sys.stdin.read()
merge(parts={[str(part) for part in parts]!r}, out="out", progress=wait, shard_bytes=1)
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout.readline() == b"now\n"
        with pytest.raises(CannotDo, match="another process is preparing"):
            merge(parts=parts, out=tmp_path / "out")
        process.send_signal(signal.SIGKILL)
    assert not (tmp_path / "out").exists()
    merge(parts=parts, out=tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["0", "1", "documents", "out"]


@pytest.mark.parametrize("change", ["file", "seed", "more files"])
def test_what_was_left_of_another_job_is_not_gone_on_with(tmp_path, change):
    texts = documents(40)
    given = options(write_documents(tmp_path / "documents", texts), memory_bytes=200)
    calls = 0

    def interrupt(stage, done, total):
        nonlocal calls
        calls += stage == "writing"
        if calls:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(out=tmp_path / "out", progress=interrupt, **given)
    assert (tmp_path / ".out.preparing" / "spool" / spool.JOURNAL).exists()
    match change:
        case "file":
            (tmp_path / "documents" / "03").write_bytes(b"other text")
        case "seed":
            given["seed"] = 1
        case _:
            (tmp_path / "documents" / "0").write_bytes(b"one more")
    made = prepare(out=tmp_path / "out", **given)
    assert prepare(out=tmp_path / "straight", **given) == made


def test_a_link_in_the_place_of_a_spool_is_not_followed(tmp_path):
    given = options(write_documents(tmp_path / "documents", documents(10)))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis").write_text("mine")
    (tmp_path / ".out.preparing").mkdir()
    (tmp_path / ".out.preparing" / "spool").symlink_to(tmp_path / "mine")
    prepare(out=tmp_path / "out", **given)
    assert (tmp_path / "mine" / "thesis").read_text() == "mine"


def test_parts_take_one_tokenizer_and_train_none(tmp_path):
    given = options(write_documents(tmp_path / "documents", documents(40)))
    with pytest.raises(WrongInput, match="would train another one on each shard"):
        prepare_part(
            out=tmp_path / "0", shard=0, shards=2, **given, tokenizer="sentencepiece:train:285"
        )
    alone = prepare(out=tmp_path / "alone", **given | {"tokenizer": "sentencepiece:train:285"})
    assert alone.tokenizer.training is not None
    model = f"sentencepiece:{tmp_path}/alone/tokenizer.model"
    parts = [tmp_path / "0", tmp_path / "1"]
    for number, part in enumerate(parts):
        prepare_part(out=part, shard=number, shards=2, **given, tokenizer=model)
    merged = merge(parts=parts, out=tmp_path / "merged")
    assert merged.digest == alone.digest
    with Corpus.open(tmp_path / "merged") as corpus:
        rows = corpus.read("train", range(corpus.num_sequences("train")))
        assert "document" in corpus.decode(rows[0])
        corpus.verify()
    shutil.copy(tmp_path / "documents" / "03", tmp_path / "merged" / "tokenizer.model")
    with (
        Corpus.open(tmp_path / "merged") as corpus,
        pytest.raises(WrongInput, match=r"tokenizer\.model is not the tokenizer that"),
    ):
        corpus.decode(rows[0])


def test_a_vocabulary_is_not_trained_again_after_an_interruption(tmp_path, monkeypatch):
    given = options(write_documents(tmp_path / "documents", documents(40)))
    given["tokenizer"] = "sentencepiece:train:285"
    trained = []
    original = vocabulary.train
    monkeypatch.setattr(vocabulary, "train", lambda *args: trained.append(args) or original(*args))

    def interrupt(stage, done, total):
        if stage == "reading":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(out=tmp_path / "out", progress=interrupt, **given)
    made = prepare(out=tmp_path / "out", **given)
    assert len(trained) == 1
    assert prepare(out=tmp_path / "straight", **given) == made
    assert len(trained) == 2


def test_a_record_that_has_not_the_tokens_it_says_is_refused(tmp_path):
    given = options(write_documents(tmp_path / "documents", documents(10)))
    prepare_part(out=tmp_path / "0", shard=0, shards=1, **given)
    (record, *_) = spool.in_order([tmp_path / "0"], "train", tmp_path)
    name = f"train-{record.key[0]:02x}.bucket"
    (tmp_path / "0" / name).unlink()
    text = (tmp_path / "0" / spool.JOURNAL).read_text()
    journal = spool.Journal.model_validate_json(text)
    files = {key: size for key, size in journal.files.items() if key != name}
    writer = spool.Writer(tmp_path / "0", journal.model_copy(update={"files": files}))
    writer.add("train", record._replace(num_tokens=record.num_tokens + 1))
    writer.commit(writer.journal)
    with pytest.raises(CannotDo, match=r"has not the .* tokens that it says"):
        merge(parts=[tmp_path / "0"], out=tmp_path / "corpus")


def test_room_is_said_before_it_starts_and_too_little_is_refused(tmp_path, monkeypatch):
    given = options(write_documents(tmp_path / "documents", documents(40)))
    told = []
    prepare(out=tmp_path / "out", progress=lambda *report: told.append(report), **given)
    assert told[0][0] == "room"
    sizes = sum(path.stat().st_size for path in (tmp_path / "documents").iterdir())
    assert told[0][1] == 2 * 2 * sizes  # two bytes a token, in the spool and in the corpus
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=100))
    with pytest.raises(CannotDo, match="has 100 free"):
        prepare(out=tmp_path / "full", **given)
