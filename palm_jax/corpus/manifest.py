"""What a prepared corpus holds, and what it was made from: its manifest.json.

A corpus is a folder:

  manifest.json                        written last
  SPLIT-00000-of-00003.arrayrecord     records of L+1 tokens, in order of sequence id
  SPLIT.offsets.npy                    i64[documents + 1, 2], where each document begins in the
                                       split's token stream, and its name in the names; the last
                                       row holds their lengths
  SPLIT.names.jsonl                    the documents' names in the same order, a string a line
  SPLIT.digests.npy                    u8[documents, 16], of the documents' contents
  tokenizer.model                      where the tokenizer is SentencePiece
"""

# L sequence length

from __future__ import annotations

import hashlib
import json
import math
import os
import pathlib
import re
from typing import Annotated, Literal

import pydantic

from palm_jax import files
from palm_jax.errors import WrongInput

FILE_NAME = "manifest.json"
SPLITS = ("train", "held_out")

Natural = Annotated[int, pydantic.Field(ge=0, lt=2**63)]
Positive = Annotated[int, pydantic.Field(gt=0, lt=2**63)]
FileName = Annotated[str, pydantic.Field(pattern=r"^[A-Za-z0-9_.-]+$")]  # never another folder
Sha256 = Annotated[str, pydantic.Field(pattern=r"^[0-9a-f]{64}$")]


class Strict(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False
    )


class Shard(Strict):
    file: FileName
    sequences: Positive
    sha256: Sha256


class IndexFile(Strict):
    file: FileName
    sha256: Sha256


class Training(Strict):
    """How a SentencePiece vocabulary was trained; the sample is of the split train."""

    sentencepiece: str  # version of the library
    sample_bytes: Positive  # of text
    sample_documents: Positive
    threads: Positive  # more than one would add up in another order


class Tokenizer(Strict):
    """Which tokenizer. Ids below `vocabulary_size`, `end_of_document` among them."""

    kind: Literal["bytes", "sentencepiece"]
    vocabulary_size: Annotated[int, pydantic.Field(gt=0, le=2**31)]  # batches are int32
    end_of_document: Natural
    model: IndexFile | None = None
    training: Training | None = None  # None: it came as it is

    @pydantic.model_validator(mode="after")
    def _is_whole(self) -> Tokenizer:
        if self.end_of_document >= self.vocabulary_size:
            raise ValueError(
                f"end_of_document={self.end_of_document} is not below vocabulary_size="
                f"{self.vocabulary_size}"
            )
        if (self.kind == "sentencepiece") != (self.model is not None):
            raise ValueError(f"kind={self.kind} and model={self.model} do not go together")
        return self

    @property
    def identity(self) -> str:
        """Equal where ids mean the same, whoever trained it."""
        return self.kind if self.model is None else f"{self.kind} {self.model.sha256}"

    @property
    def dtype(self) -> Literal["uint16", "uint32"]:
        """The smallest type that holds every id."""
        return "uint16" if self.vocabulary_size <= 2**16 else "uint32"


class Split(Strict):
    """One split. Its stream is an end of document, then each document and its end.

    A target is a token with a predecessor, so `tokens`, all targets, is the stream without
    its first: the tokens of all documents and one end each.
    """

    documents: Positive
    distinct_documents: Positive  # by content
    bytes: Positive  # of all documents
    tokens: Positive  # targets in the stream = sequences * sequence_length + tail_tokens
    sequences: Positive
    tail_tokens: Natural  # targets left out, because they do not fill a sequence
    target_bytes: Natural  # bytes that the targets of the kept sequences stand for
    tokens_sha256: Sha256  # of the kept stream as little-endian int32
    shards: tuple[Shard, ...]
    offsets: IndexFile
    names: IndexFile
    digests: IndexFile


class Manifest(Strict):
    format: Literal[2] = 2
    digest: Sha256  # of all that determines the token rows, see `corpus_digest`
    tokenizer: Tokenizer
    dtype: Literal["uint16", "uint32"]  # of the records, little-endian
    sequence_length: Positive  # targets per sequence
    seed: Natural
    held_out: Annotated[float, pydantic.Field(gt=0, lt=1)]  # fraction of distinct documents
    source: Annotated[tuple[str, ...], pydantic.Field(min_length=1)]  # as given
    document_separator: str | None
    drop_duplicates: bool
    source_digest: Sha256  # of the documents' contents, whatever their names and order
    documents_read: Positive  # = empty + duplicates dropped + the documents of both splits
    empty_documents: Natural  # of no bytes; left out
    duplicates_dropped: Natural  # of one content with a document that is kept
    invalid_utf8_documents: Natural  # kept, byte for byte
    longest_document_bytes: Positive
    documents_in_both_splits: Natural  # distinct contents
    # On held_out; None where the vocabulary is too large.
    bigram_bits_per_byte: Annotated[float, pydantic.Field(ge=0)] | None
    splits: dict[str, Split]

    @pydantic.model_validator(mode="after")
    def _counts_add_up(self) -> Manifest:
        if tuple(self.splits) != SPLITS:
            raise ValueError(f"splits are {', '.join(self.splits)}, not {', '.join(SPLITS)}")
        kept = sum(split.documents for split in self.splits.values())
        if self.documents_read != self.empty_documents + self.duplicates_dropped + kept:
            raise ValueError(
                f"documents_read={self.documents_read} is not empty_documents="
                f"{self.empty_documents}, duplicates_dropped={self.duplicates_dropped} and the "
                f"{kept} of the splits"
            )
        if self.dtype != self.tokenizer.dtype:
            raise ValueError(
                f"dtype={self.dtype}, but ids below {self.tokenizer.vocabulary_size} take "
                f"{self.tokenizer.dtype}"
            )
        for name, split in self.splits.items():
            if split.tokens != split.sequences * self.sequence_length + split.tail_tokens:
                raise ValueError(f"splits.{name}: sequences and tail do not add up to tokens")
            if split.sequences != sum(shard.sequences for shard in split.shards):
                raise ValueError(f"splits.{name}: the shards do not add up to sequences")
        if self.digest != corpus_digest(self.tokenizer, self.sequence_length, self.splits):
            raise ValueError(f"digest={self.digest} is not that of the entries it is made from")
        return self

    @property
    def vocabulary_size(self) -> int:
        return self.tokenizer.vocabulary_size

    @property
    def end_of_document(self) -> int:
        return self.tokenizer.end_of_document

    def is_same_corpus(self, other: Manifest) -> bool:
        """Equal rows, names and origin; how they are spread over files may differ."""
        return self._identity() == other._identity()

    def _identity(self) -> dict[str, object]:
        # Offsets are a file of numpy's, whose header may differ; the rows imply them.
        without = {name: {"shards", "offsets"} for name in self.splits}
        return self.model_dump(exclude={"splits": without})


def corpus_digest(tokenizer: Tokenizer, sequence_length: int, splits: dict[str, Split]) -> str:
    """Hash of what determines the token rows of every split, and of nothing else.

    Paths, names and the division into shards are not part of it.
    """
    text = json.dumps(
        {
            "tokenizer": tokenizer.identity,
            "vocabulary_size": tokenizer.vocabulary_size,
            "sequence_length": sequence_length,
            "splits": {
                name: [split.sequences, split.tokens_sha256]
                for name, split in sorted(splits.items())
            },
        },
        sort_keys=True,
    )
    return hashlib.sha256(text.encode()).hexdigest()


def local_folder(path: str | os.PathLike[str], setting: str) -> pathlib.Path:
    """The absolute path, so that a later change of directory does not matter.

    Raises:
      WrongInput: it is a URL. (As a path, gs://bucket would become a folder named "gs:".)
    """
    text = os.fspath(path)
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", text):
        raise WrongInput(f"{setting}={text} is a URL; name a local folder")
    return pathlib.Path(text).absolute()


def read(folder: pathlib.Path) -> Manifest:
    """The manifest of the corpus in `folder`.

    Raises:
      WrongInput: there is no corpus there, or its manifest is not one.
    """
    path = folder / FILE_NAME
    try:
        return files.described(path, Manifest)
    except (FileNotFoundError, NotADirectoryError):
        missing = f"has no {FILE_NAME}" if folder.is_dir() else "is not a folder"
        raise WrongInput(
            f"data.corpus={folder} {missing}; make a corpus with `palm-jax data prepare`"
        ) from None
    except OSError as error:
        raise WrongInput(f"cannot read {path}: {error}") from error
    except ValueError as error:
        raise WrongInput(
            f"{path} is not a manifest of this version, {error}; "
            "make the corpus again with `palm-jax data prepare`"
        ) from None


def write(folder: pathlib.Path, manifest: Manifest) -> None:
    assert manifest.bigram_bits_per_byte is None or math.isfinite(manifest.bigram_bits_per_byte)
    (folder / FILE_NAME).write_text(manifest.model_dump_json(indent=2) + "\n", encoding="utf-8")


def file_sha256(path: pathlib.Path) -> str:
    with files.opened(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
