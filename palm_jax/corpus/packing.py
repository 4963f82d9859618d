"""Pack the documents of one split, in order, into sequences, shards and the split's index."""

# L sequence length, V vocabulary

from __future__ import annotations

import collections.abc
import hashlib
import json
import pathlib

import numpy as np
import numpy.typing as npt
from array_record.python import array_record_module

from palm_jax.corpus import bigram, manifest, spool, tokenizers
from palm_jax.corpus.manifest import IndexFile, Shard, Split
from palm_jax.corpus.spool import Record
from palm_jax.errors import CannotDo

Tokens = npt.NDArray[np.integer]

# A record a chunk, uncompressed: a random batch then reads what it asks for and no more.
WRITER_OPTIONS = "group_size:1,uncompressed"

_BLOCK_TOKENS = 2**20  # tokens joined and cut at a time


def write_split(
    place: pathlib.Path,
    name: str,
    records: collections.abc.Iterable[Record],
    tokenizer: tokenizers.Tokenizer,
    dtype: np.dtype,
    sequence_length: int,
    shard_bytes: int,
    tell: collections.abc.Callable[[int], None],
) -> tuple[Split | None, npt.NDArray[np.int64]]:
    """Write one split's files.

    Args:
      records: the split's documents in order.
      tell: called with the number of sequences written.
    Returns:
      The split, or None if there is not one whole sequence; and its pair counts, i64[V, V],
      of no element where the vocabulary is too large for them.
    """
    L, V = sequence_length, tokenizer.vocabulary_size
    per_shard = max(1, shard_bytes // ((L + 1) * dtype.itemsize))
    pairs = np.zeros((V, V) if V <= bigram.LARGEST_VOCABULARY else (0, 0), np.int64)
    digest = hashlib.sha256(np.array([tokenizer.end_of_document], "<i4").data)
    target_bytes = sequences = 0
    index = _Index(place, name)
    with index, _ShardWriter(place, name, per_shard) as shards:
        stream = _stream(index.adding(records), tokenizer.end_of_document, dtype)
        for block in _blocks(stream, L):
            digest.update(block[1:].astype("<i4").data)
            target_bytes += tokenizer.num_bytes(block[1:])
            if pairs.size:
                pairs += bigram.count_pairs(block, V)
            rows = np.lib.stride_tricks.sliding_window_view(block, L + 1)
            for row in rows[::L]:
                shards.write(row.tobytes())
            sequences += (block.size - 1) // L
            tell(sequences)
    if sequences == 0:
        return None, pairs
    return Split(
        documents=index.documents,
        distinct_documents=index.distinct,
        bytes=index.num_bytes,
        tokens=index.position - 1,
        sequences=sequences,
        tail_tokens=index.position - 1 - sequences * L,
        target_bytes=target_bytes,
        tokens_sha256=digest.hexdigest(),
        shards=shards.renamed(),
        **{
            kind: IndexFile(file=path.name, sha256=manifest.file_sha256(path))
            for kind, path in index.paths.items()
        },
    ), pairs


def without_copies(
    records: collections.abc.Iterable[Record],
) -> collections.abc.Iterator[Record]:
    """The first document of each content; copies follow each other."""
    last = None
    for record in records:
        if record.digest != last:
            yield record
        last = record.digest


class _Index:
    """Writes where each document is in the stream, its name and its digest, as they come."""

    def __init__(self, place: pathlib.Path, split: str) -> None:
        self.paths = {
            "offsets": place / f"{split}.offsets.npy",
            "names": place / f"{split}.names.jsonl",
            "digests": place / f"{split}.digests.npy",
        }
        self.documents = self.distinct = self.num_bytes = 0
        self.position = 1  # in the stream, which an end of document opens
        self._name_bytes = 0

    def __enter__(self) -> _Index:
        self._files = {kind: path.open("wb") for kind, path in self.paths.items()}
        self._write_headers()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            if kind is None:
                self._offset()
                for file in (self._files["offsets"], self._files["digests"]):
                    file.seek(0)
                self._write_headers()
        finally:
            for file in self._files.values():
                file.close()

    def _write_headers(self) -> None:
        # NumPy leaves room in a header for its number of rows to grow.
        for kind, dtype, rows, columns in (
            ("offsets", np.dtype("<i8"), self.documents + 1, 2),
            ("digests", np.dtype("u1"), self.documents, 16),
        ):
            np.lib.format.write_array_header_1_0(
                self._files[kind],
                {
                    "descr": np.lib.format.dtype_to_descr(dtype),
                    "fortran_order": False,
                    "shape": (rows, columns),
                },
            )

    def adding(self, records: collections.abc.Iterable[Record]) -> collections.abc.Iterator[Record]:
        last = None
        for record in records:
            self._offset()
            # Escaped ASCII also holds file names that are not UTF-8.
            line = (json.dumps(record.name) + "\n").encode("ascii")
            self._files["names"].write(line)
            self._files["digests"].write(record.digest)
            self.documents += 1
            self.distinct += record.digest != last
            self.num_bytes += record.num_bytes
            self.position += record.num_tokens + 1
            self._name_bytes += len(line)
            last = record.digest
            yield record

    def _offset(self) -> None:
        row = np.array([self.position, self._name_bytes], "<i8")
        self._files["offsets"].write(row.tobytes())


def _stream(
    records: collections.abc.Iterable[Record], end_of_document: int, dtype: np.dtype
) -> collections.abc.Iterator[Tokens]:
    """The split's tokens in pieces: an end of document, then each document and its end."""
    end = np.array([end_of_document], dtype)
    yield end
    for record in records:
        yield spool.token_array(record, dtype)
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

    def __init__(self, place: pathlib.Path, split: str, per_shard: int) -> None:
        self._finished: list[tuple[pathlib.Path, int]] = []
        self._place, self._split, self._per_shard = place, split, per_shard
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

    def renamed(self) -> tuple[Shard, ...]:
        """The shards, now that it is known how many there are."""
        shards = []
        for number, (path, sequences) in enumerate(self._finished):
            name = f"{self._split}-{number:05d}-of-{len(self._finished):05d}.arrayrecord"
            path = path.rename(self._place / name)
            shards.append(Shard(file=name, sequences=sequences, sha256=manifest.file_sha256(path)))
        return tuple(shards)

    def _path(self) -> pathlib.Path:
        return self._place / f"{self._split}-{len(self._finished):05d}.arrayrecord"

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
            self._finished.append((path, self._in_shard))
        self._in_shard = 0
