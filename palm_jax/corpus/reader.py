"""Open a prepared corpus: any sequences by their ids, and the documents they came from."""

# L sequence length

from __future__ import annotations

import bisect
import collections.abc
import dataclasses
import functools
import os
import pathlib
from typing import Any

import numpy as np
import numpy.typing as npt
from array_record.python import array_record_module

from palm_jax import files
from palm_jax.corpus import arrays, manifest, tokenizers
from palm_jax.corpus.manifest import Manifest, Split
from palm_jax.errors import WrongInput

# No read-ahead: batches are random, what lies behind a record is not wanted next.
READER_OPTIONS = "readahead_buffer_size:0"
# How `decode` shows the end of a document. Text may spell it too: it is for the eye.
END_MARKER = "<|end of document|>"

_MOST_NAME_BYTES = 2**16
_AGAIN = "make the corpus again with `palm-jax data prepare`"


@dataclasses.dataclass(frozen=True)
class DocumentSpan:
    """The columns [start, stop) of a sequence that hold a document's tokens and its end.

    `offset` is how many of the document's tokens lie in earlier columns' sequences.
    """

    name: str
    start: int
    stop: int
    offset: int = 0


class Corpus:
    """A corpus folder, open for reading from any number of threads."""

    def __init__(self, folder: pathlib.Path, contents: Manifest) -> None:
        self.folder = folder
        self.manifest = contents
        if contents.tokenizer.model is None:
            tokenizers.open_tokenizer(folder, contents.tokenizer)  # it is what it says it is
        self._dtype = np.dtype(contents.dtype).newbyteorder("<")
        self._readers = {
            name: [_open_shard(folder, shard, contents) for shard in split.shards]
            for name, split in contents.splits.items()
        }
        self._indexes: dict[str, Index] = {}
        self._ends = {  # sequences up to and with each shard
            name: np.cumsum([shard.sequences for shard in split.shards])
            for name, split in contents.splits.items()
        }

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Corpus:
        """Open the corpus in folder `path`; every shard is there with all its records.

        Raises:
          WrongInput: it is missing or damaged. (Bytes changed inside a shard show when they
            are read, or by `verify`.)
        """
        folder = manifest.local_folder(path, "data.corpus")
        return cls(folder, manifest.read(folder))

    def close(self) -> None:
        for readers in self._readers.values():
            for reader in readers:
                reader.close()

    def __enter__(self) -> Corpus:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @functools.cached_property
    def tokenizer(self) -> tokenizers.Tokenizer:
        """Read when it is first asked for: training takes ids as they are.

        Raises:
          WrongInput: its model is missing or damaged.
        """
        return tokenizers.open_tokenizer(self.folder, self.manifest.tokenizer)

    @property
    def sequence_length(self) -> int:
        """Targets per sequence; a sequence has one token more."""
        return self.manifest.sequence_length

    def num_sequences(self, split: str) -> int:
        return self._split(split).sequences

    def read(
        self, split: str, ids: collections.abc.Sequence[int] | npt.NDArray[np.integer]
    ) -> npt.NDArray[np.int32]:
        """The sequences of `ids`, in that order: i32[len(ids), L+1].

        Raises:
          WrongInput: there is no such split or sequence, or a record is damaged.
        """
        wanted = np.asarray(ids, np.int64).reshape(-1)
        num_sequences = self._split(split).sequences
        for strange in wanted[(wanted < 0) | (wanted >= num_sequences)][:1]:
            raise WrongInput(
                f"sequence {strange} of split {split} does not exist: "
                f"{self.folder} has {num_sequences}, from 0"
            )
        tokens = np.empty((wanted.size, self.sequence_length + 1), np.int32)
        ends = self._ends[split]
        shard_of = np.searchsorted(ends, wanted, side="right")
        for shard in np.unique(shard_of).tolist():
            places = np.flatnonzero(shard_of == shard)
            first = int(ends[shard - 1]) if shard else 0
            tokens[places] = self._read_shard(split, shard, (wanted[places] - first).tolist())
        return tokens

    def _read_shard(self, split: str, shard: int, records: list[int]) -> npt.NDArray[np.integer]:
        path = self.folder / self._split(split).shards[shard].file
        try:
            found: list[bytes] = self._readers[split][shard].read(records)
        except RuntimeError as error:
            raise WrongInput(f"{path} is damaged: {error}; {_AGAIN}") from error
        num_bytes = (self.sequence_length + 1) * self._dtype.itemsize
        for record, content in zip(records, found, strict=True):
            if len(content) != num_bytes:
                raise WrongInput(
                    f"{path} is damaged: record {record} has {len(content)} bytes, "
                    f"not {num_bytes}; {_AGAIN}"
                )
        tokens = np.frombuffer(b"".join(found), self._dtype).reshape(len(records), -1)
        # An id beyond the table would be clamped by the embedding without a word.
        if tokens.max() >= self.manifest.vocabulary_size:
            raise WrongInput(
                f"{path} is damaged: it holds token {tokens.max()}, outside the vocabulary of "
                f"{self.manifest.vocabulary_size}; {_AGAIN}"
            )
        return tokens

    def documents(self, split: str, sequence_id: int) -> list[DocumentSpan]:
        """The documents in one sequence. The spans leave out no column, but for the end of
        document that opens the stream (column 0 of sequence 0).

        Raises:
          WrongInput: there is no such split or sequence, or the index is damaged.
        """
        num_sequences = self._split(split).sequences
        if not 0 <= sequence_id < num_sequences:
            raise WrongInput(
                f"sequence {sequence_id} of split {split} does not exist: "
                f"{self.folder} has {num_sequences}, from 0"
            )
        index = self.index(split)
        first = sequence_id * self.sequence_length
        last = first + self.sequence_length + 1
        # Not np.searchsorted, which would copy a column of the file to have it in one piece.
        begin = max(0, bisect.bisect_right(index.starts, first) - 1)
        end = bisect.bisect_left(index.starts, last, hi=len(index.starts) - 1)
        starts = index.starts[begin : end + 1].tolist()
        if starts != sorted(set(starts)) or not starts[0] <= max(1, first) < starts[-1]:
            raise WrongInput(
                f"{self.folder / self._split(split).offsets.file} is damaged: its offsets do not "
                f"rise at sequence {sequence_id}; {_AGAIN}"
            )
        return [
            DocumentSpan(
                name=index.name(document),
                start=max(start, first) - first,
                stop=min(stop, last) - first,
                offset=max(0, first - start),
            )
            for document, start, stop in zip(
                range(begin, end), starts[:-1], starts[1:], strict=True
            )
        ]

    def verify(self) -> None:
        """Compare every file's SHA-256 with the manifest.

        Raises:
          WrongInput: one differs; the message names it.
        """
        for split in self.manifest.splits.values():
            entries: list[manifest.Shard | manifest.IndexFile] = [*split.shards]
            for entry in [*entries, split.offsets, split.names, split.digests]:
                path = self.folder / entry.file
                try:
                    found = manifest.file_sha256(path)
                except OSError as error:
                    raise WrongInput(f"cannot read {path}: {error}; {_AGAIN}") from error
                if found != entry.sha256:
                    raise WrongInput(
                        f"{path} is not what was prepared: its SHA-256 is {found}, "
                        f"the manifest's {entry.sha256}; {_AGAIN}"
                    )
        if self.manifest.tokenizer.model is not None:
            tokenizers.open_tokenizer(self.folder, self.manifest.tokenizer)

    def decode(self, row: npt.NDArray[np.integer]) -> str:
        """Tokens as text to look at: ends of documents marked, invalid UTF-8 replaced.

        Raises:
          WrongInput: the corpus is damaged.
        """
        row = np.asarray(row)
        (ends,) = np.nonzero(row == self.manifest.end_of_document)
        texts = []
        for part in np.split(row, ends):
            if part.size and part[0] == self.manifest.end_of_document:
                texts.append(END_MARKER)
                part = part[1:]
            try:
                content = self.tokenizer.decode(part)
            except ValueError as error:
                raise WrongInput(f"{self.folder} is damaged: {error}; {_AGAIN}") from None
            texts.append(content.decode("utf-8", errors="replace"))
        return "".join(texts)

    def _split(self, split: str) -> Split:
        if split not in self.manifest.splits:
            raise WrongInput(
                f"{self.folder} has no split {split!r}; there are: "
                f"{', '.join(self.manifest.splits)}"
            )
        return self.manifest.splits[split]

    def index(self, split: str) -> Index:
        """Which documents a split holds, and where.

        Raises:
          WrongInput: there is no such split, or its index is damaged.
        """
        # Kept, since each sequence shown asks again; two threads at worst open it twice.
        if split not in self._indexes:
            self._indexes[split] = Index(self.folder, self._split(split))
        return self._indexes[split]


def _open_shard(
    folder: pathlib.Path, shard: manifest.Shard, contents: Manifest
) -> array_record_module.ArrayRecordReader:
    path = folder / shard.file
    if not path.is_file():
        raise WrongInput(f"{path} is missing; {_AGAIN}")
    # Records are not compressed, and whoever reads them makes room for them first.
    num_bytes = (contents.sequence_length + 1) * np.dtype(contents.dtype).itemsize
    if (size := path.stat().st_size) < (needed := shard.sequences * num_bytes):
        raise WrongInput(
            f"{path} has {size:,} bytes, too few for the {shard.sequences:,} sequences of "
            f"{contents.sequence_length:,} that the manifest says ({needed:,} bytes); {_AGAIN}"
        )
    try:
        reader = array_record_module.ArrayRecordReader(str(path), READER_OPTIONS)
        num_records = reader.num_records()
    except RuntimeError as error:
        raise WrongInput(f"{path} is damaged: {error}; {_AGAIN}") from error
    # A file that is cut off, or is no ArrayRecord at all, opens with 0 records and no error.
    if num_records != shard.sequences:
        raise WrongInput(
            f"{path} has {num_records} sequences, the manifest says {shard.sequences}; {_AGAIN}"
        )
    return reader


class Index:
    """The documents of a split, in files that are read where they are asked."""

    def __init__(self, folder: pathlib.Path, split: Split) -> None:
        self._offsets_path = folder / split.offsets.file
        self._names_path = folder / split.names.file
        offsets = _mapped(self._offsets_path, np.dtype("<i8"), (split.documents + 1, 2))
        self.digests = _mapped(folder / split.digests.file, np.dtype("u1"), (split.documents, 16))
        try:
            with files.opened(self._names_path) as file:
                names_bytes = os.fstat(file.fileno()).st_size
        except OSError as error:
            raise WrongInput(f"cannot read {self._names_path}: {error}; {_AGAIN}") from error
        self.starts, self._names = offsets[:, 0], offsets[:, 1]
        # The stream is an end of document, then the documents with an end each.
        ends = [*offsets[0].tolist(), *offsets[-1].tolist()]
        if ends != (should := [1, 0, 1 + split.tokens, names_bytes]):
            raise WrongInput(
                f"{self._offsets_path} is damaged: it begins and ends with {ends}, not {should}, "
                f"the lengths of the split's stream and names; {_AGAIN}"
            )

    def name(self, document: int) -> str:
        """The name of a document, by its place in the split.

        Raises:
          WrongInput: the index is damaged.
        """
        start, stop = self._names[document : document + 2].tolist()
        try:
            if not 0 <= start < stop <= start + _MOST_NAME_BYTES:
                raise ValueError(f"its name is said to be in bytes {start}:{stop}")
            with files.opened(self._names_path) as file:
                file.seek(start)
                name = files.parsed(file.read(stop - start).decode("ascii"))
            if not isinstance(name, str):
                raise ValueError("its name is no text")
        except (OSError, ValueError) as error:
            raise WrongInput(
                f"{self._names_path} is damaged at document {document}: {error}; {_AGAIN}"
            ) from error
        return name


def _mapped(path: pathlib.Path, dtype: np.dtype, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    try:
        with files.opened(path) as file:
            found, size, start = arrays.header(file, os.fstat(file.fileno()).st_size)
        if found != dtype or size != shape:
            raise ValueError(f"it holds {found} of shape {size}, not {dtype} of {shape}")
        return np.memmap(path, dtype, "r", start, shape)
    except (OSError, ValueError) as error:
        raise WrongInput(f"{path} is damaged: {error}; {_AGAIN}") from error
