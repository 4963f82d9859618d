"""What a model is evaluated on: sequences, and the documents that their targets belong to.

Documents are joined with ends of documents and cut at the length: sequence k of a stream has the
targets at its places k L + 1 to (k + 1) L. A target belongs to the document that its place lies
in, the end of a document to the document that it ends.
"""

# L sequence length

from __future__ import annotations

import collections.abc
import dataclasses
import pathlib
from typing import Any

import numpy as np
import numpy.typing as npt

from palm_jax import files
from palm_jax.corpus.corpora import Corpora
from palm_jax.corpus.reader import Corpus
from palm_jax.corpus.tokenizers import Tokenizer
from palm_jax.errors import WrongInput

TEXT = "text"  # in the place of a split's name


@dataclasses.dataclass(frozen=True)
class Stream:
    """Documents joined to one stream, and the sequences that it was cut into."""

    ids: range  # of its sequences
    starts: npt.NDArray[np.int64]  # place of each document's first token, then the stream's length
    name: collections.abc.Callable[[int], str]  # of a document, by its place among them

    @property
    def num_documents(self) -> int:
        return len(self.starts) - 1


@dataclasses.dataclass(frozen=True)
class Material:
    """Sequences to evaluate on. What the last one lacks of its length does not count."""

    split: str
    sequence_length: int
    num_sequences: int
    read: collections.abc.Callable[[Any], npt.NDArray[np.integer]]  # ids to tokens [ids, L+1]
    streams: tuple[Stream, ...]  # their sequences' ids one after the other
    tokenizer: Tokenizer

    @property
    def num_documents(self) -> int:
        return sum(stream.num_documents for stream in self.streams)

    def name(self, document: int) -> str:
        """Of a document, by its place among those of all streams."""
        for stream in self.streams:
            if document < stream.num_documents:
                return stream.name(document)
            document -= stream.num_documents
        raise IndexError(f"there is no document {document} more")


def of_split(corpus: Corpus | Corpora, split: str) -> Material:
    """All of a split.

    Raises:
      WrongInput: there is no such split, or the corpus is damaged.
    """
    num_sequences = corpus.num_sequences(split)  # refuses a split that is not there
    if isinstance(corpus, Corpus):
        streams = [_stream(corpus, split, 0, "")]
        tokenizer = corpus.tokenizer
    else:
        streams, first = [], 0
        for name, one in corpus.corpora.items():
            streams.append(_stream(one, split, first, f"{name}: "))
            first = streams[-1].ids.stop
        tokenizer = next(iter(corpus.corpora.values())).tokenizer
    return Material(
        split=split,
        sequence_length=corpus.sequence_length,
        num_sequences=num_sequences,
        read=lambda ids: corpus.read(split, ids),
        streams=tuple(streams),
        tokenizer=tokenizer,
    )


def _stream(corpus: Corpus, split: str, first: int, prefix: str) -> Stream:
    index = corpus.index(split)
    return Stream(
        ids=range(first, first + corpus.num_sequences(split)),
        starts=np.array(index.starts),
        name=lambda document: prefix + index.name(document),
    )


def of_texts(
    paths: collections.abc.Sequence[pathlib.Path], tokenizer: Tokenizer, sequence_length: int
) -> Material:
    """Each file as a document, joined as a corpus's are; no target is left out.

    Raises:
      WrongInput: a file cannot be read, or is empty.
    """
    parts = [np.array([tokenizer.end_of_document], np.int64)]
    starts = [1]
    for path in paths:
        try:
            with files.opened(path) as file:
                content = file.read()
        except (OSError, ValueError) as error:
            raise WrongInput(f"--text {path} cannot be read: {error}") from None
        if not content:
            raise WrongInput(f"--text {path} is empty; name a file with some text")
        parts += [tokenizer.encode(content).astype(np.int64), parts[0]]
        starts.append(starts[-1] + len(parts[-2]) + 1)
    stream = np.concatenate(parts)
    num_sequences = -(-(len(stream) - 1) // sequence_length)
    padded = np.full(num_sequences * sequence_length + 1, tokenizer.end_of_document, np.int32)
    padded[: len(stream)] = stream

    def read(ids: Any) -> npt.NDArray[np.integer]:
        return padded[np.asarray(ids)[:, None] * sequence_length + np.arange(sequence_length + 1)]

    return Material(
        split=TEXT,
        sequence_length=sequence_length,
        num_sequences=num_sequences,
        read=read,
        streams=(
            Stream(range(num_sequences), np.array(starts, np.int64), lambda n: str(paths[n])),
        ),
        tokenizer=tokenizer,
    )


def bytes_of_ids(tokenizer: Tokenizer) -> npt.NDArray[np.int64]:
    """How many bytes of text each id stands for, i64[V]."""
    ids = np.arange(tokenizer.vocabulary_size)
    return np.array([tokenizer.num_bytes(ids[i : i + 1]) for i in ids], np.int64)


def also_trained_on(corpus: Corpus | Corpora, split: str, trained_on: Corpus | Corpora) -> int:
    """How many documents of a split have the content of one in the split `train` of another."""
    digests = _digests(corpus, split)
    return int(np.isin(digests, _digests(trained_on, "train")).sum())


def _digests(corpus: Corpus | Corpora, split: str) -> npt.NDArray[Any]:
    """Of the documents' contents, as pairs of words."""
    each = [corpus] if isinstance(corpus, Corpus) else list(corpus.corpora.values())
    whole = np.concatenate([one.index(split).digests for one in each])
    return whole.view([("first", "<u8"), ("second", "<u8")]).reshape(-1)
