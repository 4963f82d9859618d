"""Tokenizers: bytes to token ids and back, without loss."""

from __future__ import annotations

import pathlib
from typing import Protocol

import numpy as np
import numpy.typing as npt

from palm_jax.corpus import manifest
from palm_jax.errors import WrongInput

Tokens = npt.NDArray[np.integer]

KINDS = "bytes, sentencepiece:FILE, sentencepiece:train:VOCABULARY"


class Tokenizer(Protocol):
    """What a corpus needs of a tokenizer.

    `encode` never returns `end_of_document`: text that spells a control token stays text.
    """

    vocabulary_size: int  # with the end-of-document id
    end_of_document: int

    def encode(self, content: bytes) -> Tokens:
        """Any bytes, valid UTF-8 or not, to the smallest unsigned type that holds every id."""

    def decode(self, tokens: Tokens) -> bytes:
        """The bytes of `tokens`, which must hold no end-of-document id.

        Raises:
          ValueError: a token stands for no text.
        """

    def num_bytes(self, tokens: Tokens) -> int:
        """How many bytes of text `tokens` stand for; an end of document stands for none."""


class ByteTokenizer:
    """The 256 bytes, and 256 for the end of a document. Nothing has to be trained first."""

    vocabulary_size = 257
    end_of_document = 256

    def encode(self, content: bytes) -> Tokens:
        return np.frombuffer(content, np.uint8).astype("<u2")

    def decode(self, tokens: Tokens) -> bytes:
        tokens = np.asarray(tokens)
        strange = tokens[(tokens < 0) | (tokens > 255)]
        if strange.size:
            raise ValueError(f"token {strange[0]} is not a byte (0 to 255)")
        return tokens.astype(np.uint8).tobytes()

    def num_bytes(self, tokens: Tokens) -> int:
        return int(np.count_nonzero(np.asarray(tokens) != self.end_of_document))


BYTES = manifest.Tokenizer(kind="bytes", vocabulary_size=257, end_of_document=256)


def open_tokenizer(folder: pathlib.Path, described: manifest.Tokenizer) -> Tokenizer:
    """The tokenizer of a corpus, or of a part of one, in `folder`.

    Raises:
      WrongInput: its model is missing, damaged, or not the one that is described.
    """
    # Only here, because a run of bytes needs no SentencePiece.
    from palm_jax.corpus import sentencepieces

    found: Tokenizer = (
        ByteTokenizer()
        if described.model is None
        else sentencepieces.read(folder / described.model.file, described.model.sha256)
    )
    for entry in ("vocabulary_size", "end_of_document"):
        if (own := getattr(found, entry)) != (said := getattr(described, entry)):
            raise WrongInput(
                f"{folder} has {entry}={said}, but its tokenizer ({described.kind}) has {own}; "
                "make the corpus again with `palm-jax data prepare`"
            )
    return found
