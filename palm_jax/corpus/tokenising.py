"""Read the documents of a source, tokenise them, and fill a spool: where it left off, if it did."""

from __future__ import annotations

import collections
import collections.abc
import dataclasses
import hashlib
import itertools
import pathlib
import shutil

from palm_jax.corpus import (
    manifest,
    sentencepieces,
    sources,
    spool,
    tokenizers,
    vocabulary,
    workers,
)
from palm_jax.corpus.manifest import IndexFile
from palm_jax.corpus.spool import Journal, Recipe, Tally
from palm_jax.corpus.workers import Place, Tokenised, content_digest
from palm_jax.errors import CannotDo, WrongInput

Progress = collections.abc.Callable[[str, int, int], None]  # (stage, done, total)

_GROUP_BYTES = 2**20  # text that a worker takes at a time
_ROOM_BYTES = 2**17  # text by which the room on disk is estimated


@dataclasses.dataclass(frozen=True)
class Job:
    """What to make a corpus, or a part of one, from, and how.

    Raises:
      WrongInput: a setting is out of range.
    """

    source: str | tuple[str, ...]  # one or several, see `sources.open_source`
    sequence_length: int  # L, targets per sequence
    seed: int = 0  # orders the documents of each split; the split itself does not depend on it
    # Fraction of distinct documents to hold out. Documents of one content are on one side; a
    # larger fraction holds out the same ones and more.
    held_out: float = 0.005
    document_separator: str | None = None  # splits each file of `text:` into documents
    # `bytes`, `sentencepiece:FILE`, or `sentencepiece:train:V`, which trains one of V ids on
    # `sample_bytes` of the split train.
    tokenizer: str = "bytes"
    sample_bytes: int = vocabulary.SAMPLE_BYTES
    data_dir: str | None = None  # of the datasets of `tfds:`
    drop_duplicates: bool = False  # keep one document of each content, the first
    workers: int = 1  # processes that tokenise
    memory_bytes: int = spool.MEMORY_BYTES  # of tokens that are held at a time, about
    # Of all units of the source (files, or a dataset's shards), every `shards`-th from `shard`.
    shard: int = 0
    shards: int = 1

    def __post_init__(self) -> None:
        for setting, least in (
            ("sequence_length", 1),
            ("seed", 0),
            ("sample_bytes", 1),
            ("workers", 1),
            ("memory_bytes", 1),
        ):
            value = getattr(self, setting)
            if isinstance(value, bool) or value < least:
                raise WrongInput(f"{setting}={value} must be {least} or more")
        object.__setattr__(self, "source", several(self.source))
        if isinstance(self.held_out, bool) or not 0 < self.held_out < 1:
            raise WrongInput(f"held_out={self.held_out} must be a fraction between 0 and 1")
        if not 0 <= self.shard < self.shards:
            raise WrongInput(
                f"shard={self.shard}/{self.shards} does not exist; shards are 0/{self.shards} to "
                f"{self.shards - 1}/{self.shards}"
            )

    def recipe(self, tokenizer: manifest.Tokenizer) -> Recipe:
        return Recipe(
            source=several(self.source),
            document_separator=self.document_separator,
            sequence_length=self.sequence_length,
            seed=self.seed,
            held_out=self.held_out,
            drop_duplicates=self.drop_duplicates,
            tokenizer=tokenizer,
        )


def several(source: str | collections.abc.Iterable[str]) -> tuple[str, ...]:
    return (source,) if isinstance(source, str) else tuple(source)


def split_of(digest: bytes, held_out: float) -> str:
    """The split of a document, by its `content_digest` alone."""
    split_hash = hashlib.blake2b(digest, digest_size=8, person=b"held-out split")
    is_held_out = int.from_bytes(split_hash.digest(), "big") < int(held_out * 2**64)
    return "held_out" if is_held_out else "train"


def fill(folder: pathlib.Path, job: Job, tell: Progress) -> Journal:
    """The complete spool of the job's shard, in `folder`.

    What an earlier process committed there is taken over, if it was the same job on the same
    files; anything else there is removed.
    """
    source = sources.open_source(job.source, job.document_separator, job.data_dir)
    asked, train = _parse(job)
    journal = _left_off(folder, job, asked, source)
    if journal is None:
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir()
        described = _make_tokenizer(folder, job, train, source, tell)
        journal = Journal(
            recipe=job.recipe(described),
            asked=asked,
            shard=job.shard,
            shards=job.shards,
            units=len(source.units),
            listing=_listing(source.units) if train else "",
        )
    writer = spool.Writer(folder, journal, job.memory_bytes)
    if train:
        writer.commit(journal)  # so that it need not be trained again
    tokenizer = tokenizers.open_tokenizer(folder, journal.recipe.tokenizer)
    _check_room(folder, job, source, tokenizer, tell)
    _add_all(writer, folder, job, source, tell)
    return writer.journal


def found_again(folder: pathlib.Path, job: Job) -> Journal | None:
    """The complete spool of this job that is in `folder` already, if that is what is there."""
    source = sources.open_source(job.source, job.document_separator, job.data_dir)
    found = _left_off(folder, job, _parse(job)[0], source)
    return found if found is not None and found.is_complete else None


def _parse(job: Job) -> tuple[str, int]:
    """The tokenizer as asked, whatever a file of it is called, and how large one to train."""
    kind, _, rest = job.tokenizer.partition(":")
    if job.tokenizer == "bytes":
        return "bytes", 0
    if kind != "sentencepiece" or not rest:
        raise WrongInput(
            f"tokenizer={job.tokenizer!r} does not exist; there are: {tokenizers.KINDS}"
        )
    if not rest.startswith("train:"):
        path = pathlib.Path(rest)
        sentencepieces.read(path)
        return f"sentencepiece:{manifest.file_sha256(path)}", 0
    size = rest.removeprefix("train:")
    if not (size.isdecimal() and size.isascii() and len(size) < 10):
        raise WrongInput(f"tokenizer={job.tokenizer}: {size!r} is no number of ids")
    if job.shards > 1:
        raise WrongInput(
            f"tokenizer={job.tokenizer} would train another one on each shard; make one first "
            "(`palm-jax data prepare` on a sample, which leaves tokenizer.model in the corpus) "
            "and give it to all: sentencepiece:FILE"
        )
    return f"{job.tokenizer} on {job.sample_bytes}", int(size)


def _left_off(folder: pathlib.Path, job: Job, asked: str, source: sources.Source) -> Journal | None:
    """What an earlier process left in `folder`; None if this job cannot go on from there."""
    if not (folder / spool.JOURNAL).exists():
        return None
    try:
        found = spool.read_journal(folder)
    except WrongInput:
        return None  # torn, of another version: to be made again
    same = (
        found.recipe == job.recipe(found.recipe.tokenizer)
        and (found.asked, found.shard, found.shards) == (asked, job.shard, job.shards)
        and found.units == len(source.units)
        and found.stamps == _listing(_mine(source, job)[: _num_begun(found)])
        and found.listing in ("", _listing(source.units))
    )
    return found if same else None


def _mine(source: sources.Source, job: Job) -> tuple[sources.Unit, ...]:
    return source.units[job.shard :: job.shards]


def _num_begun(journal: Journal) -> int:
    """How many of its shard's units a journal knows something of."""
    begun = journal.unit + (journal.document > 0)
    return len(range(journal.shard, min(begun, journal.units), journal.shards))


def _listing(units: collections.abc.Iterable[sources.Unit]) -> str:
    digest = hashlib.sha256()
    for unit in units:
        digest.update(f"{unit.name}\0{unit.stamp}\0".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def _make_tokenizer(
    folder: pathlib.Path, job: Job, train: int, source: sources.Source, tell: Progress
) -> manifest.Tokenizer:
    if job.tokenizer == "bytes":
        return tokenizers.BYTES
    path, training = folder / sentencepieces.FILE_NAME, None
    if train:
        sample = _sample(job, source, tell)
        tell("training the tokenizer", 0, 1)
        content, training = vocabulary.train(sample, train)
        path.write_bytes(content)
        tell("training the tokenizer", 1, 1)
    else:
        shutil.copyfile(job.tokenizer.partition(":")[2], path)
    found = sentencepieces.read(path)
    return manifest.Tokenizer(
        kind="sentencepiece",
        vocabulary_size=found.vocabulary_size,
        end_of_document=found.end_of_document,
        model=IndexFile(file=path.name, sha256=manifest.file_sha256(path)),
        training=training,
    )


def _sample(job: Job, source: sources.Source, tell: Progress) -> list[bytes]:
    sample = vocabulary.Sample(job.sample_bytes)
    for place in _places(source, job, 0, 0):
        digest = content_digest(place.document.content)
        if place.document.content and split_of(digest, job.held_out) == "train":
            sample.offer(spool.key_of(digest, job.seed), place.document.content)
        tell("choosing a sample", place.read, max(place.read, source.num_bytes))
    return sample.documents()


def _places(
    source: sources.Source, job: Job, unit: int, document: int
) -> collections.abc.Iterator[Place]:
    """The shard's documents from document `document` of unit `unit` on."""
    before = 0
    for index in range(job.shard, len(source.units), job.shards):
        here = source.units[index]
        if index >= unit:
            skipped = document if index == unit else 0
            for number, (found, read) in enumerate(here.documents()):
                if number >= skipped:
                    yield Place(index, number, found, before + read)
        before += here.num_bytes


def _grouped(places: collections.abc.Iterable[Place]) -> collections.abc.Iterator[list[Place]]:
    group: list[Place] = []
    size = 0
    for place in places:
        group.append(place)
        # 1 for each, so that a group of empty documents ends as well.
        size += len(place.document.content) + 1
        if size >= _GROUP_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group


def _check_room(
    folder: pathlib.Path,
    job: Job,
    source: sources.Source,
    tokenizer: tokenizers.Tokenizer,
    tell: Progress,
) -> None:
    """Say what the corpus and its spool will take on disk, by the first documents."""
    written = read = raw = text = 0
    for place in itertools.islice(_places(source, job, 0, 0), 1000):
        content = place.document.content
        text, raw = text + len(content), place.read
        written += tokenizer.encode(content[: _ROOM_BYTES - read]).nbytes
        read += len(content[: _ROOM_BYTES - read])
        if read >= _ROOM_BYTES:
            break
    mine = sum(unit.num_bytes for unit in _mine(source, job))
    # Compressed files hold more text than they have bytes.
    mine = max(mine, mine * text // max(1, raw))
    copies = 2 if job.shards == 1 else 1  # tokens in the spool, and in the corpus
    needed = copies * mine * written // max(1, read)
    free = shutil.disk_usage(folder).free
    tell("room", needed, free)
    if needed > free:
        raise CannotDo(
            f"out: the corpus and what is kept while it is made take about {needed:,} bytes, and "
            f"{folder.parent} has {free:,} free; make room, or name another place"
        )


def _add_all(
    writer: spool.Writer,
    folder: pathlib.Path,
    job: Job,
    source: sources.Source,
    tell: Progress,
) -> None:
    counts = _Counts(writer.journal)
    total = sum(unit.num_bytes for unit in _mine(source, job))
    begun = writer.journal
    groups = _grouped(_places(source, job, begun.unit, begun.document))
    described = writer.journal.recipe.tokenizer
    for group in workers.tokenised(groups, folder, described, job.workers):
        for done in group:
            if done.tokens.size:
                split = split_of(done.digest, job.held_out)
                writer.add(split, _record(done, job.seed))
                counts.add(split, done)
            else:
                counts.empty += 1
        last = group[-1]
        if writer.is_full:
            now = {"unit": last.unit, "document": last.number + 1}
            so_far = writer.journal.model_copy(update={**now, **counts.entries()})
            stamps = _listing(_mine(source, job)[: _num_begun(so_far)])
            writer.commit(so_far.model_copy(update={"stamps": stamps}))
        tell("reading", last.read, max(last.read, total))
    whole = {"unit": len(source.units), "document": 0, "stamps": _listing(_mine(source, job))}
    writer.commit(writer.journal.model_copy(update={**whole, **counts.entries()}))


def _record(done: Tokenised, seed: int) -> spool.Record:
    return spool.Record(
        key=spool.key_of(done.digest, seed),
        unit=done.unit,
        number=done.number,
        digest=done.digest,
        num_bytes=done.num_bytes,
        num_tokens=done.tokens.size,
        name=done.name,
        tokens=done.tokens.data,
    )


class _Counts:
    """The counts of a journal, as documents are added."""

    def __init__(self, journal: Journal) -> None:
        self._tallies = {
            split: [tally.documents, tally.tokens, tally.bytes]
            for split, tally in journal.tallies.items()
        }
        self.empty = journal.empty_documents
        self._invalid = journal.invalid_utf8_documents
        self._longest = journal.longest_document_bytes
        self._contents = int(journal.contents, 16)

    def add(self, split: str, done: Tokenised) -> None:
        tally = self._tallies[split]
        tally[0] += 1
        tally[1] += done.tokens.size
        tally[2] += done.num_bytes
        self._invalid += not done.is_utf8
        self._longest = max(self._longest, done.num_bytes)
        self._contents = add_contents(
            self._contents, int.from_bytes(hashlib.sha256(done.digest).digest(), "big")
        )

    def entries(self) -> dict[str, object]:
        return {
            "tallies": {
                split: Tally(documents=documents, tokens=tokens, bytes=num_bytes)
                for split, (documents, tokens, num_bytes) in self._tallies.items()
            },
            "empty_documents": self.empty,
            "invalid_utf8_documents": self._invalid,
            "longest_document_bytes": self._longest,
            "contents": f"{self._contents:064x}",
        }


def add_contents(one: int, other: int) -> int:
    return (one + other) % 2**256
