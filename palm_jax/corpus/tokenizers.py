"""Tokenizers: bytes to token ids and back, without loss."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from palm_jax.errors import WrongInput

Tokens = npt.NDArray[np.integer]


class Tokenizer(Protocol):
    """What a corpus needs of a tokenizer.

    `encode` never returns `end_of_document`: text that spells a control token stays text.
    """

    name: str
    vocabulary_size: int  # with the end-of-document id
    end_of_document: int
    dtype: np.dtype  # smallest unsigned little-endian type that holds every id

    def encode(self, content: bytes) -> Tokens: ...

    def decode(self, tokens: Tokens) -> bytes: ...

    def num_bytes(self, tokens: Tokens) -> int: ...


class ByteTokenizer:
    """The 256 bytes, and 256 for the end of a document. Nothing has to be trained first."""

    name = "bytes"
    vocabulary_size = 257
    end_of_document = 256
    dtype = np.dtype("<u2")

    def encode(self, content: bytes) -> Tokens:
        """Any bytes, valid UTF-8 or not, to `dtype`[len(content)]."""
        return np.frombuffer(content, np.uint8).astype(self.dtype)

    def decode(self, tokens: Tokens) -> bytes:
        """The bytes of `tokens`, which must hold no end-of-document id.

        Raises:
          ValueError: a token is not a byte.
        """
        tokens = np.asarray(tokens)
        strange = tokens[(tokens < 0) | (tokens > 255)]
        if strange.size:
            raise ValueError(f"token {strange[0]} is not a byte (0 to 255)")
        return tokens.astype(np.uint8).tobytes()

    def num_bytes(self, tokens: Tokens) -> int:
        """How many bytes of text `tokens` stand for; an end of document stands for none."""
        return int(np.count_nonzero(np.asarray(tokens) != self.end_of_document))


TOKENIZERS: dict[str, Tokenizer] = {"bytes": ByteTokenizer()}


def by_name(name: str) -> Tokenizer:
    """The tokenizer that a manifest names.

    Raises:
      WrongInput: there is none of that name.
    """
    if name not in TOKENIZERS:
        raise WrongInput(f"tokenizer={name!r} does not exist; there are: {', '.join(TOKENIZERS)}")
    return TOKENIZERS[name]
