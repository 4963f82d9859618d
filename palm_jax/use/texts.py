"""Generated tokens as text: whole characters only, nothing that could steer a terminal."""

from __future__ import annotations

import codecs
import collections.abc

import numpy as np

from palm_jax.corpus.tokenizers import Tokenizer


def content(tokenizer: Tokenizer, tokens: collections.abc.Iterable[int]) -> bytes:
    """The bytes of tokens; ends of documents and other tokens without text stand for none."""
    each = [np.asarray([token]) for token in tokens]
    return b"".join(tokenizer.decode(one) for one in each if tokenizer.num_bytes(one))


class Stream:
    """Text from tokens that come a few at a time.

    A character's bytes wait until they are all there. Bytes that are no UTF-8 become U+FFFD.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._characters = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def __call__(self, tokens: collections.abc.Iterable[int], *, is_last: bool = False) -> str:
        return self._characters.decode(content(self.tokenizer, tokens), is_last)


def shown(text: str) -> str:
    """For a terminal: other control characters than line ends and tabs become a dot."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{MIDDLE DOT}" for c in text)
