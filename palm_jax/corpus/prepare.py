"""Prepare a corpus: read, split, shuffle, join, cut, and write it as one finished folder.

Documents are tokenised into a spool file in source order, and their places in it are then
shuffled, so that memory holds the list of documents but never all of their text. The result
depends on the documents, the settings and the seed alone: not on the number of workers, the
order of the file system, or paths.
"""

# L sequence length, V vocabulary

from __future__ import annotations

import collections
import collections.abc
import concurrent.futures
import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import pathlib
import shutil

import numpy as np
import numpy.typing as npt
from array_record.python import array_record_module

from palm_jax.corpus import bigram, manifest, sources, tokenizers
from palm_jax.corpus.manifest import IndexFile, Manifest, Shard, Split
from palm_jax.errors import CannotDo, WrongInput

Tokens = npt.NDArray[np.integer]
Progress = collections.abc.Callable[[str, int, int], None]  # (stage, done, total)

SHARD_BYTES = 256 * 2**20
# A record a chunk, uncompressed: a random batch then reads what it asks for and no more.
WRITER_OPTIONS = "group_size:1,uncompressed"

_GROUP_BYTES = 2**20  # text that a worker takes at a time
_BLOCK_TOKENS = 2**20  # tokens joined and cut at a time


def prepare(
    *,
    source: str,
    out: str | os.PathLike[str],
    sequence_length: int,
    seed: int = 0,
    held_out: float = 0.005,
    document_separator: str | None = None,
    workers: int = 1,
    shard_bytes: int = SHARD_BYTES,
    progress: Progress | None = None,
) -> Manifest:
    """Write the corpus folder `out` (`manifest.py` describes it) and return its manifest.

    Each split is one stream: an end of document, then document after document with an end
    each. Sequence i is stream[i L : i L + L + 1]; neighbours share a token, so that every
    token of every document, and every end, is a target exactly once. Nothing is padded; only
    the targets at the stream's end that do not fill a sequence are left out, and counted.

    Preparing the same corpus again changes nothing and returns its manifest.

    Args:
      source: `stdlib` or `text:GLOB`, see `sources.open_source`.
      sequence_length: L, targets per sequence.
      seed: orders the documents of each split; the split itself does not depend on it.
      held_out: fraction of distinct documents to hold out. Documents of one content are on
        one side; a larger fraction holds out the same ones and more.
      document_separator: splits each text file into documents.
      workers: threads that tokenise.
      shard_bytes: tokens of a shard, at most (but one record at least).
      progress: told (stage, done, total), in bytes while "reading" (total is an estimate),
        in sequences while "writing".
    Raises:
      WrongInput: a setting is out of range, the source has no or too few documents, or
        `out` holds something else.
      CannotDo: `out` cannot be written, or another process is preparing it.
    """
    folder = manifest.local_folder(out, "out")
    settings = _Settings(source, sequence_length, seed, held_out, document_separator)
    for setting, number in (("workers", workers), ("shard_bytes", shard_bytes)):
        if isinstance(number, bool) or number < 1:
            raise WrongInput(f"{setting}={number} must be 1 or more")
    documents = sources.open_source(source, document_separator)
    tell = progress or (lambda stage, done, total: None)
    try:
        existing = _existing(folder, settings)
        with _workplace(folder) as workplace:
            made = _make(workplace, documents, settings, workers, shard_bytes, tell)
            if existing is None:
                _finish(workplace, folder)
            elif not existing.is_same_corpus(made):
                raise WrongInput(
                    f"out={folder} holds a corpus made from other documents "
                    f"({existing.digest[:16]}, this would be {made.digest[:16]}); "
                    "name another folder or remove that one"
                )
    except OSError as error:
        raise CannotDo(f"cannot write the corpus out={folder}: {error}") from error
    return existing or made


@dataclasses.dataclass(frozen=True)
class _Settings:
    source: str
    sequence_length: int
    seed: int
    held_out: float
    document_separator: str | None

    def __post_init__(self) -> None:
        if isinstance(self.sequence_length, bool) or self.sequence_length < 1:
            raise WrongInput(f"sequence_length={self.sequence_length} must be 1 or more")
        if isinstance(self.seed, bool) or self.seed < 0:
            raise WrongInput(f"seed={self.seed} must be 0 or more")
        if isinstance(self.held_out, bool) or not 0 < self.held_out < 1:
            raise WrongInput(f"held_out={self.held_out} must be a fraction between 0 and 1")


def _existing(folder: pathlib.Path, settings: _Settings) -> Manifest | None:
    """The manifest of a corpus already in `folder`, if it was made with these settings."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return None
    if not (folder / manifest.FILE_NAME).is_file():
        raise WrongInput(
            f"out={folder} exists and is not a corpus; name another folder or remove it"
        )
    found = manifest.read(folder)
    for setting, value in dataclasses.asdict(settings).items():
        if getattr(found, setting) != value:
            raise WrongInput(
                f"out={folder} holds a corpus made with {setting}={getattr(found, setting)!r}, "
                f"not {value!r}; name another folder or remove that one"
            )
    return found


@contextlib.contextmanager
def _workplace(folder: pathlib.Path) -> collections.abc.Iterator[pathlib.Path]:
    """A locked, empty folder beside `folder`, gone afterwards unless it was renamed.

    What a killed process left there is removed; its lock went with it.
    """
    place = folder.parent / f".{folder.name}.preparing"
    place.mkdir(parents=True, exist_ok=True)
    # Not through a link: what lies there is removed.
    handle = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CannotDo(
                f"another process is preparing {folder} (in {place}); wait for it"
            ) from None
        # Had that process finished in between, the handle would be the finished corpus.
        if not place.is_dir() or not os.path.samestat(os.fstat(handle), place.stat()):
            raise CannotDo(f"another process was preparing {folder}; try again")
        for leftover in place.iterdir():
            leftover.unlink()
        try:
            yield place
        finally:
            if place.is_dir() and os.path.samestat(os.fstat(handle), place.stat()):
                shutil.rmtree(place)
    finally:
        os.close(handle)


def _finish(workplace: pathlib.Path, folder: pathlib.Path) -> None:
    for path in (*workplace.iterdir(), workplace):
        _sync(path)
    workplace.rename(folder)
    _sync(folder.parent)


def _sync(path: pathlib.Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _make(
    place: pathlib.Path,
    source: sources.Files,
    settings: _Settings,
    workers: int,
    shard_bytes: int,
    tell: Progress,
) -> Manifest:
    """Write every file of the corpus into `place`."""
    tokenizer = tokenizers.by_name("bytes")
    spool_path = place / "spool"
    table = _spool(spool_path, source, tokenizer, workers, tell)
    members = _split_and_shuffle(table, settings, tokenizer)
    total = sum(_num_sequences(table, rows, settings) for rows in members.values())
    # No document with a token leaves nothing to map; _split_and_shuffle has refused that.
    spool = np.memmap(spool_path, tokenizer.dtype, mode="r")
    splits: dict[str, Split] = {}
    pairs: dict[str, npt.NDArray[np.int64]] = {}
    for name, rows in members.items():
        done = sum(split.sequences for split in splits.values())
        splits[name], pairs[name] = _write_split(
            place,
            name,
            table.rows(rows),
            spool,
            tokenizer,
            settings.sequence_length,
            shard_bytes,
            _counting_from(done, total, tell),
        )
    del spool
    spool_path.unlink()
    contents = {name: set(table.rows(rows).digests) for name, rows in members.items()}
    made = Manifest(
        digest=manifest.corpus_digest(
            tokenizer.name, tokenizer.vocabulary_size, settings.sequence_length, splits
        ),
        tokenizer=tokenizer.name,
        vocabulary_size=tokenizer.vocabulary_size,
        end_of_document=tokenizer.end_of_document,
        dtype=tokenizer.dtype.name,  # type: ignore[arg-type]
        **dataclasses.asdict(settings),
        source_digest=hashlib.sha256(b"".join(sorted(table.digests))).hexdigest(),
        documents_read=len(table.names) + table.num_empty,
        empty_documents=table.num_empty,
        invalid_utf8_documents=table.num_invalid_utf8,
        longest_document_bytes=max(table.num_bytes),
        documents_in_both_splits=len(contents["train"] & contents["held_out"]),
        bigram_bits_per_byte=(
            bigram.bits_per_byte(pairs["train"], pairs["held_out"], splits["held_out"].target_bytes)
            if pairs["train"].size and splits["held_out"].target_bytes
            else None
        ),
        splits=splits,
    )
    manifest.write(place, made)
    return made


def _counting_from(done: int, total: int, tell: Progress) -> collections.abc.Callable[[int], None]:
    return lambda written: tell("writing", done + written, total)


@dataclasses.dataclass
class _Table:
    """The documents, a row each: empty ones are only counted."""

    names: list[str] = dataclasses.field(default_factory=list)
    digests: list[bytes] = dataclasses.field(default_factory=list)  # of the content, 16 bytes
    num_bytes: list[int] = dataclasses.field(default_factory=list)
    starts: list[int] = dataclasses.field(default_factory=list)  # in the spool, in tokens
    num_tokens: list[int] = dataclasses.field(default_factory=list)
    num_empty: int = 0
    num_invalid_utf8: int = 0

    def rows(self, which: collections.abc.Iterable[int]) -> _Table:
        return _Table(
            [self.names[i] for i in which],
            [self.digests[i] for i in which],
            [self.num_bytes[i] for i in which],
            [self.starts[i] for i in which],
            [self.num_tokens[i] for i in which],
        )


def _spool(
    path: pathlib.Path,
    source: sources.Files,
    tokenizer: tokenizers.Tokenizer,
    workers: int,
    tell: Progress,
) -> _Table:
    """Tokenise every document into one file, in source order."""
    table = _Table()
    read, total, position = 0, source.num_bytes, 0
    with path.open("wb") as file:
        for group in _tokenised(_grouped(source.documents()), tokenizer, workers):
            for name, num_bytes, digest, is_utf8, tokens in group:
                read += num_bytes
                table.num_empty += num_bytes == 0
                if num_bytes == 0:
                    continue
                table.num_invalid_utf8 += not is_utf8
                table.names.append(name)
                table.digests.append(digest)
                table.num_bytes.append(num_bytes)
                table.starts.append(position)
                table.num_tokens.append(tokens.size)
                position += tokens.size
                file.write(tokens.astype(tokenizer.dtype, copy=False).data)
            tell("reading", read, max(read, total))
    return table


_Tokenised = tuple[str, int, bytes, bool, Tokens]


def _tokenise(group: list[sources.Document], tokenizer: tokenizers.Tokenizer) -> list[_Tokenised]:
    return [
        (
            document.name,
            len(document.content),
            content_digest(document.content),
            _is_utf8(document.content),
            tokenizer.encode(document.content),
        )
        for document in group
    ]


def _is_utf8(content: bytes) -> bool:
    try:
        content.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _grouped(
    documents: collections.abc.Iterable[sources.Document],
) -> collections.abc.Iterator[list[sources.Document]]:
    group: list[sources.Document] = []
    size = 0
    for document in documents:
        group.append(document)
        # 1 for each, so that a group of empty documents ends as well.
        size += len(document.content) + 1
        if size >= _GROUP_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group


def _tokenised(
    groups: collections.abc.Iterable[list[sources.Document]],
    tokenizer: tokenizers.Tokenizer,
    workers: int,
) -> collections.abc.Iterator[list[_Tokenised]]:
    """The groups tokenised, in their order, with a bounded number in memory."""
    if workers == 1:
        for group in groups:
            yield _tokenise(group, tokenizer)
        return
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        pending: collections.deque[concurrent.futures.Future[list[_Tokenised]]]
        pending = collections.deque()
        for group in groups:
            pending.append(pool.submit(_tokenise, group, tokenizer))
            if len(pending) > 2 * workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


def _split_and_shuffle(
    table: _Table, settings: _Settings, tokenizer: tokenizers.Tokenizer
) -> dict[str, list[int]]:
    """The rows of `table` in each split, in stream order.

    Raises:
      WrongInput: no documents, or a split without documents or without a whole sequence.
    """
    if not table.names:
        raise WrongInput(
            f"source={settings.source} has no document with any text "
            f"({table.num_empty} empty); give it some"
        )
    members: dict[str, list[int]] = {name: [] for name in manifest.SPLITS}
    for row, digest in enumerate(table.digests):
        members[split_of(digest, settings.held_out)].append(row)
    seed = hashlib.blake2b(str(settings.seed).encode(), digest_size=16).digest()
    order = [hashlib.blake2b(d, key=seed, digest_size=16).digest() for d in table.digests]
    for rows in members.values():
        rows.sort(key=order.__getitem__)  # stable: equal documents stay in source order

    needed = settings.sequence_length + 1
    there = {name: _stream_length(table, rows) for name, rows in members.items() if rows}
    if sum(there.values()) < len(members) * needed:
        raise WrongInput(
            f"source={settings.source} has {sum(there.values())} tokens, too few: one sequence "
            f"for each split needs {len(members)} x {needed} = {len(members) * needed} "
            f"(sequence_length={settings.sequence_length} and one); give more text or make "
            "sequence_length smaller"
        )
    for name in members:
        remedy = "raise held_out" if name == "held_out" else "lower held_out"
        if name not in there:
            raise WrongInput(
                f"the {name} split has none of the {len(table.names)} documents at "
                f"held_out={settings.held_out}; {remedy} or give more documents"
                + ("" if settings.document_separator else " (document_separator makes more)")
            )
        if there[name] < needed:
            raise WrongInput(
                f"the {name} split has {there[name]} tokens at held_out={settings.held_out}, too "
                f"few: a sequence needs {needed} (sequence_length={settings.sequence_length} and "
                f"one); {remedy}, give more text or make sequence_length smaller"
            )
    return members


def content_digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).digest()


def split_of(digest: bytes, held_out: float) -> str:
    """The split of a document, by its `content_digest` alone."""
    split_hash = hashlib.blake2b(digest, digest_size=8, person=b"held-out split")
    is_held_out = int.from_bytes(split_hash.digest(), "big") < int(held_out * 2**64)
    return "held_out" if is_held_out else "train"


def _stream_length(table: _Table, rows: list[int]) -> int:
    return 1 + sum(table.num_tokens[row] + 1 for row in rows)


def _num_sequences(table: _Table, rows: list[int], settings: _Settings) -> int:
    return (_stream_length(table, rows) - 1) // settings.sequence_length


def _write_split(
    place: pathlib.Path,
    name: str,
    documents: _Table,
    spool: Tokens,
    tokenizer: tokenizers.Tokenizer,
    sequence_length: int,
    shard_bytes: int,
    tell: collections.abc.Callable[[int], None],
) -> tuple[Split, npt.NDArray[np.int64]]:
    """Write one split's files; the split, and its pair counts (for a small vocabulary)."""
    num_tokens = sum(documents.num_tokens) + len(documents.names)
    sequences = num_tokens // sequence_length
    per_shard = max(1, shard_bytes // ((sequence_length + 1) * tokenizer.dtype.itemsize))
    V = tokenizer.vocabulary_size
    pairs = np.zeros((V, V) if V <= bigram.LARGEST_VOCABULARY else (0, 0), np.int64)
    digest = hashlib.sha256(np.array([tokenizer.end_of_document], "<i4").data)
    target_bytes = written = 0
    with _ShardWriter(place, name, sequences, per_shard) as shards:
        for block in _blocks(_stream(documents, spool, tokenizer), sequence_length):
            digest.update(block[1:].astype("<i4").data)
            target_bytes += tokenizer.num_bytes(block[1:])
            if pairs.size:
                pairs += bigram.count_pairs(block, V)
            rows = np.lib.stride_tricks.sliding_window_view(block, sequence_length + 1)
            for row in rows[::sequence_length]:
                shards.write(row.tobytes())
            written += (block.size - 1) // sequence_length
            tell(written)
    assert written == sequences

    starts = np.cumsum([1] + [size + 1 for size in documents.num_tokens], dtype=np.int64)
    offsets, names = place / f"{name}.offsets.npy", place / f"{name}.names.jsonl"
    np.save(offsets, starts, allow_pickle=False)
    # Escaped ASCII also holds file names that are not UTF-8.
    names.write_text("".join(json.dumps(text) + "\n" for text in documents.names), "ascii")
    return Split(
        documents=len(documents.names),
        distinct_documents=len(set(documents.digests)),
        bytes=sum(documents.num_bytes),
        tokens=num_tokens,
        sequences=sequences,
        tail_tokens=num_tokens - sequences * sequence_length,
        target_bytes=target_bytes,
        tokens_sha256=digest.hexdigest(),
        shards=tuple(shards.finished),
        offsets=IndexFile(file=offsets.name, sha256=manifest.file_sha256(offsets)),
        names=IndexFile(file=names.name, sha256=manifest.file_sha256(names)),
    ), pairs


def _stream(
    documents: _Table, spool: Tokens, tokenizer: tokenizers.Tokenizer
) -> collections.abc.Iterator[Tokens]:
    """The split's tokens in pieces: an end of document, then each document and its end."""
    end = np.array([tokenizer.end_of_document], tokenizer.dtype)
    yield end
    for start, size in zip(documents.starts, documents.num_tokens, strict=True):
        for first in range(start, start + size, _BLOCK_TOKENS):
            yield spool[first : min(first + _BLOCK_TOKENS, start + size)]
        yield end


def _blocks(
    pieces: collections.abc.Iterable[Tokens], sequence_length: int
) -> collections.abc.Iterator[Tokens]:
    """The stream in blocks of whole sequences: n L + 1 tokens, of which neighbours share one."""
    pending: list[Tokens] = []
    size = 0
    for piece in pieces:
        pending.append(piece)
        size += piece.size
        if size > max(_BLOCK_TOKENS, sequence_length):
            joined = np.concatenate(pending)
            whole = (size - 1) // sequence_length * sequence_length
            yield joined[: whole + 1]
            pending, size = [joined[whole:]], size - whole
    joined = np.concatenate(pending)
    whole = (size - 1) // sequence_length * sequence_length
    if whole:
        yield joined[: whole + 1]


class _ShardWriter:
    """Records in order over as many shards as they need."""

    def __init__(self, place: pathlib.Path, split: str, num_records: int, per_shard: int) -> None:
        self.finished: list[Shard] = []
        self._place, self._split, self._per_shard = place, split, per_shard
        self._num_shards = -(-num_records // per_shard)
        self._writer: array_record_module.ArrayRecordWriter | None = None
        self._in_shard = 0

    def __enter__(self) -> _ShardWriter:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        # After an error the file is thrown away, but must not be written to any more.
        self._close(count=kind is None)

    def write(self, record: bytes) -> None:
        if self._in_shard == self._per_shard:
            self._close()
        try:
            if self._writer is None:
                self._writer = array_record_module.ArrayRecordWriter(
                    str(self._path()), WRITER_OPTIONS
                )
            self._writer.write(record)
        except RuntimeError as error:
            raise CannotDo(f"cannot write {self._path()}: {error}") from error
        self._in_shard += 1

    def _path(self) -> pathlib.Path:
        number = f"{len(self.finished):05d}-of-{self._num_shards:05d}"
        return self._place / f"{self._split}-{number}.arrayrecord"

    def _close(self, count: bool = True) -> None:
        if self._writer is None:
            return
        path, writer, self._writer = self._path(), self._writer, None
        try:
            writer.close()
        except RuntimeError as error:
            if count:  # else an earlier error is on its way
                raise CannotDo(f"cannot write {path}: {error}") from error
        if count:
            self.finished.append(
                Shard(file=path.name, sequences=self._in_shard, sha256=manifest.file_sha256(path))
            )
        self._in_shard = 0
