"""Tokenised documents on disk in hashed order: a shuffle of any size in flat memory.

A document's place in its split is the rank of a hash, its key. Documents are appended to one
of 256 files by the first byte of their keys; each file is then sorted by itself, and one that
is too large for memory is first divided further. So the order depends on the documents alone:
not on when, where or by how many processes they were tokenised. Several machines fill a spool
each (`--shard i/N`), which are read together as if one had.

A spool grows by commits. Each writes a journal of how much of the source is in it and how long
every file is, so that what a killed process wrote beyond its last commit is cut off again.

  spool.json                the journal
  tokenizer.model           where the tokenizer has one
  SPLIT-00.bucket ... ff    records, see `_HEADER`
"""

from __future__ import annotations

import collections
import collections.abc
import hashlib
import os
import pathlib
import struct
import zlib
from typing import Annotated, BinaryIO, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import pydantic

from palm_jax import files
from palm_jax.corpus import manifest
from palm_jax.corpus.manifest import Natural, Positive, Sha256
from palm_jax.errors import CannotDo, WrongInput

JOURNAL = "spool.json"
# Held in memory before it is written, and of a file that is sorted at once.
MEMORY_BYTES = 64 * 2**20

# Bytes of the rest, its CRC-32; then key, source order (unit, number), digest of the content,
# its bytes, tokens, bytes of the name; then the name and the tokens.
_FRAME = struct.Struct("<QI")
_HEADER = struct.Struct("<16sIQ16sQQI")
_READ_BYTES = 2**20


class Record(NamedTuple):
    """A tokenised document."""

    key: bytes  # 16: documents are ordered by it
    unit: int  # and, of one content, by where they come from
    number: int
    digest: bytes  # 16, of the content
    num_bytes: int
    num_tokens: int
    name: str
    tokens: bytes | memoryview


class Tally(manifest.Strict):
    """Counts of one split, copies of a document included."""

    documents: Natural = 0
    tokens: Natural = 0
    bytes: Natural = 0


class Recipe(manifest.Strict):
    """What, beside the documents, determines a corpus."""

    source: Annotated[tuple[str, ...], pydantic.Field(min_length=1)]  # as given
    document_separator: str | None
    sequence_length: Positive
    seed: Natural
    held_out: Annotated[float, pydantic.Field(gt=0, lt=1)]
    drop_duplicates: bool
    tokenizer: manifest.Tokenizer


class Journal(manifest.Strict):
    """What a spool holds."""

    format: Literal[1] = 1
    recipe: Recipe
    asked: str  # the tokenizer as it was asked for
    shard: Natural = 0  # takes units shard, shard + shards, ...
    shards: Positive = 1
    units: Positive  # of the whole source
    # Of all units where the tokenizer was trained on them; else empty.
    listing: str
    # Next to be read: document `document` of unit `unit`. `stamps`: of the units begun.
    unit: Natural = 0
    document: Natural = 0
    stamps: str = hashlib.sha256().hexdigest()
    files: dict[manifest.FileName, Natural] = pydantic.Field(default_factory=dict)  # bytes of each
    tallies: dict[str, Tally] = pydantic.Field(
        default_factory=lambda: {split: Tally() for split in manifest.SPLITS}
    )
    empty_documents: Natural = 0
    invalid_utf8_documents: Natural = 0
    longest_document_bytes: Natural = 0
    contents: Sha256 = "0" * 64  # sum modulo 2^256 of a hash a document, in any order

    @property
    def is_complete(self) -> bool:
        return self.unit >= self.units


def key_of(digest: bytes, seed: int) -> bytes:
    """The key of a document, by the digest of its content."""
    salt = hashlib.blake2b(str(seed).encode(), digest_size=16).digest()
    return hashlib.blake2b(digest, key=salt, digest_size=16).digest()


def read_journal(folder: pathlib.Path) -> Journal:
    """The journal of the spool in `folder`.

    Raises:
      WrongInput: there is no spool, or it is damaged.
    """
    path = folder / JOURNAL
    try:
        found = files.described(path, Journal)
    except (FileNotFoundError, NotADirectoryError):
        raise WrongInput(
            f"{folder} is no part of a corpus: it has no {JOURNAL}; "
            "`palm-jax data prepare --shard I/N` makes one"
        ) from None
    except (OSError, ValueError) as error:
        raise WrongInput(f"{path} is damaged: {error}; make that part again") from None
    for name, size in found.files.items():
        there = (folder / name).stat().st_size if (folder / name).is_file() else 0
        if there < size:
            raise WrongInput(
                f"{folder / name} has {there:,} bytes, its journal says {size:,}; "
                "make that part again"
            )
    return found


class Writer:
    """Adds documents to the spool in `folder`, from its last commit on."""

    def __init__(
        self, folder: pathlib.Path, journal: Journal, memory_bytes: int = MEMORY_BYTES
    ) -> None:
        self.journal = journal
        self._folder, self._memory_bytes = folder, memory_bytes
        self._pending: dict[str, list[bytes]] = collections.defaultdict(list)
        self._size = 0
        for path in folder.glob("*.bucket"):
            if path.name in journal.files:
                os.truncate(path, journal.files[path.name])
            else:
                path.unlink()

    def add(self, split: str, record: Record) -> None:
        name = record.name.encode("utf-8", "surrogateescape")
        tokens = memoryview(record.tokens).cast("B")
        header = _HEADER.pack(
            *(record.key, record.unit, record.number, record.digest),
            *(record.num_bytes, record.num_tokens, len(name)),
        )
        rest = b"".join((header, name, tokens))
        pieces = self._pending[f"{split}-{record.key[0]:02x}.bucket"]
        pieces += (_FRAME.pack(len(rest), zlib.crc32(rest)), rest)
        self._size += len(rest)

    @property
    def is_full(self) -> bool:
        """Whether what is not committed has reached the memory that it may take."""
        return self._size >= self._memory_bytes

    def commit(self, journal: Journal) -> None:
        """Write what was added; `journal` describes it, but for the files' sizes."""
        sizes = dict(journal.files)
        for name, pieces in self._pending.items():
            with (self._folder / name).open("ab") as file:
                file.writelines(pieces)
                sizes[name] = file.tell()
        self._pending.clear()
        self._size = 0
        self.journal = journal.model_copy(update={"files": dict(sorted(sizes.items()))})
        path = self._folder / JOURNAL
        temporary = path.with_suffix(".tmp")
        temporary.write_text(self.journal.model_dump_json(indent=2) + "\n", encoding="utf-8")
        temporary.rename(path)


def in_order(
    folders: collections.abc.Sequence[pathlib.Path],
    split: str,
    scratch: pathlib.Path,
    memory_bytes: int = MEMORY_BYTES,
) -> collections.abc.Iterator[Record]:
    """The records of a split, of all spools together, sorted by (key, unit, number).

    Memory holds `memory_bytes` of them at most, or all copies of one document if those are
    more. Files that are too large for it are divided in `scratch`.

    Raises:
      CannotDo: a record is damaged.
    """
    for bucket in range(256):
        name = f"{split}-{bucket:02x}.bucket"
        paths = [folder / name for folder in folders if (folder / name).exists()]
        yield from _sorted(paths, scratch, 2, memory_bytes)


def _sorted(
    paths: list[pathlib.Path], scratch: pathlib.Path, nibble: int, memory_bytes: int
) -> collections.abc.Iterator[Record]:
    if sum(path.stat().st_size for path in paths) <= memory_bytes:
        yield from _in_memory(paths)
        return
    parts = [_Part(scratch / f"{nibble:02d}-{number:x}.divided") for number in range(16)]
    try:
        for path in paths:
            for content in _frames(path):
                byte = content[nibble // 2]
                parts[byte >> 4 if nibble % 2 == 0 else byte & 15].write(content)
    finally:
        for part in parts:
            part.close()
    for part in parts:
        if part.has_many_keys:
            yield from _sorted([part.path], scratch, nibble + 1, memory_bytes)
        elif part.key is not None:
            yield from _in_memory([part.path])
        part.path.unlink(missing_ok=True)


class _Part:
    """A sixteenth of a file that is too large."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        self.key: bytes | None = None
        self.has_many_keys = False
        self._file: BinaryIO | None = None

    def write(self, content: bytes) -> None:
        key = content[:16]
        if self._file is None:
            self._file, self.key = self.path.open("wb", buffering=_READ_BYTES), key
        self.has_many_keys |= key != self.key
        self._file.write(_FRAME.pack(len(content), zlib.crc32(content)))
        self._file.write(content)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def _in_memory(paths: list[pathlib.Path]) -> list[Record]:
    records = [record for path in paths for record in _read(path)]
    return sorted(records, key=lambda record: (record.key, record.unit, record.number))


def _read(path: pathlib.Path) -> collections.abc.Iterator[Record]:
    for content in _frames(path):
        *fields, name_bytes = _HEADER.unpack_from(content)
        end = _HEADER.size + name_bytes
        name = content[_HEADER.size : end].decode("utf-8", "surrogateescape")
        yield Record._make((*fields, name, memoryview(content)[end:]))


def _frames(path: pathlib.Path) -> collections.abc.Iterator[bytes]:
    most = path.stat().st_size
    with path.open("rb", buffering=_READ_BYTES) as file:
        while frame := file.read(_FRAME.size):
            content = b""
            if len(frame) == _FRAME.size:
                size, checksum = _FRAME.unpack(frame)
                # No more than there is, whatever a damaged number asks for.
                if size <= most:
                    content = file.read(size)
            if len(content) < _HEADER.size or zlib.crc32(content) != checksum:
                raise CannotDo(f"{path} is damaged; remove {path.parent} and prepare it again")
            yield content


def token_array(record: Record, dtype: np.dtype) -> npt.NDArray[np.integer]:
    """The tokens of a record.

    Raises:
      CannotDo: they are not as many as it says.
    """
    if memoryview(record.tokens).nbytes != record.num_tokens * dtype.itemsize:
        raise CannotDo(
            f"document {record.name[:200]!r} of a part is damaged: it has not the "
            f"{record.num_tokens} tokens that it says; make that part again"
        )
    return np.frombuffer(record.tokens, dtype)
