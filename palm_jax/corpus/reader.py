"""Open a prepared corpus: any sequences by their ids, and the documents they came from."""

# L sequence length

from __future__ import annotations

import collections.abc
import dataclasses
import os
import pathlib

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


_Index = tuple[npt.NDArray[np.int64], list[str]]  # (offsets, names), see manifest.py


class Corpus:
    """A corpus folder, open for reading from any number of threads."""

    def __init__(self, folder: pathlib.Path, contents: Manifest) -> None:
        self.folder = folder
        self.manifest = contents
        self.tokenizer = tokenizers.by_name(contents.tokenizer)
        _check_tokenizer(folder, contents, self.tokenizer)
        self._dtype = np.dtype(contents.dtype).newbyteorder("<")
        self._readers = {
            name: [_open_shard(folder, shard, contents) for shard in split.shards]
            for name, split in contents.splits.items()
        }
        self._indexes: dict[str, _Index] = {}
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
        offsets, names = self._index(split)
        first = sequence_id * self.sequence_length
        last = first + self.sequence_length + 1
        begin = max(0, int(np.searchsorted(offsets, first, side="right")) - 1)
        end = int(np.searchsorted(offsets[:-1], last, side="left"))
        return [
            DocumentSpan(
                name=names[document],
                start=max(start, first) - first,
                stop=min(stop, last) - first,
                offset=max(0, first - start),
            )
            for document, start, stop in zip(
                range(begin, end),
                offsets[begin:end].tolist(),
                offsets[begin + 1 : end + 1].tolist(),
                strict=True,
            )
        ]

    def verify(self) -> None:
        """Compare every file's SHA-256 with the manifest.

        Raises:
          WrongInput: one differs; the message names it.
        """
        for split in self.manifest.splits.values():
            files: list[manifest.Shard | manifest.IndexFile] = [*split.shards]
            for entry in [*files, split.offsets, split.names]:
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

    def decode(self, row: npt.NDArray[np.integer]) -> str:
        """Tokens as text to look at: ends of documents marked, invalid UTF-8 replaced."""
        row = np.asarray(row)
        (ends,) = np.nonzero(row == self.tokenizer.end_of_document)
        texts = []
        for part in np.split(row, ends):
            if part.size and part[0] == self.tokenizer.end_of_document:
                texts.append(END_MARKER)
                part = part[1:]
            texts.append(self.tokenizer.decode(part).decode("utf-8", errors="replace"))
        return "".join(texts)

    def _split(self, split: str) -> Split:
        if split not in self.manifest.splits:
            raise WrongInput(
                f"{self.folder} has no split {split!r}; there are: "
                f"{', '.join(self.manifest.splits)}"
            )
        return self.manifest.splits[split]

    def _index(self, split: str) -> _Index:
        # Kept, since each sequence shown asks again; two threads at worst read it twice.
        if split not in self._indexes:
            self._indexes[split] = _read_index(self.folder, self._split(split))
        return self._indexes[split]


def _check_tokenizer(
    folder: pathlib.Path, contents: Manifest, tokenizer: tokenizers.Tokenizer
) -> None:
    for entry, own in (
        ("vocabulary_size", tokenizer.vocabulary_size),
        ("end_of_document", tokenizer.end_of_document),
        ("dtype", tokenizer.dtype.name),
    ):
        if (found := getattr(contents, entry)) != own:
            raise WrongInput(
                f"{folder / manifest.FILE_NAME} has {entry}={found}, but the tokenizer "
                f"{tokenizer.name!r} has {own}; {_AGAIN}"
            )


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


def _read_index(folder: pathlib.Path, split: Split) -> _Index:
    offsets_path, names_path = folder / split.offsets.file, folder / split.names.file
    try:
        offsets, names = _read_offsets(offsets_path), _read_names(names_path)
    except (OSError, ValueError) as error:
        raise WrongInput(
            f"cannot read {offsets_path} and {names_path.name}: {error}; {_AGAIN}"
        ) from error
    if offsets.shape != (split.documents + 1,) or len(names) != split.documents:
        raise WrongInput(
            f"{offsets_path.name} and {names_path.name} in {folder} have {offsets.size} offsets "
            f"and {len(names)} names, not those of {split.documents} documents; {_AGAIN}"
        )
    # The stream is an end of document, then the documents with an end each.
    if offsets[0] != 1 or offsets[-1] != 1 + split.tokens or np.any(offsets[1:] <= offsets[:-1]):
        raise WrongInput(
            f"{offsets_path} is damaged: its offsets do not rise from 1 to {1 + split.tokens:,}, "
            f"the tokens of its stream; {_AGAIN}"
        )
    return offsets, names


def _read_offsets(path: pathlib.Path) -> npt.NDArray[np.int64]:
    with files.opened(path) as file:
        dtype, shape, start = arrays.header(file, os.fstat(file.fileno()).st_size)
    if dtype != np.dtype("<i8") or len(shape) != 1:
        raise ValueError(f"{path} holds {dtype} of shape {shape}, not one row of int64")
    return np.memmap(path, dtype, "r", start, shape)


def _read_names(path: pathlib.Path) -> list[str]:
    names = []
    with files.opened(path) as file:
        for number, line in enumerate(file, 1):
            name = files.parsed(line.decode("ascii"))
            if not isinstance(name, str):
                raise ValueError(f"{path}, line {number} is not a name")
            names.append(name)
    return names
