"""Small corpora for tests, with documents put into the split that a test wants."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np

from palm_jax.corpus.manifest import Manifest
from palm_jax.corpus.prepare import prepare
from palm_jax.corpus.reader import Corpus
from palm_jax.corpus.tokenising import content_digest, split_of

HELD_OUT = 0.5


def document(split: str, size: int, salt: int = 0) -> bytes:
    """`size` >= 4 bytes of text that belong to `split` at HELD_OUT."""
    rng = np.random.default_rng([size, salt])
    while True:
        content = bytes(rng.choice(np.frombuffer(b"abcdefgh \n", np.uint8), size))
        if split_of(content_digest(content), HELD_OUT) == split:
            return content


def write_documents(folder: pathlib.Path, documents: dict[str, bytes]) -> str:
    """Write them as files, and return the source that reads them."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in documents.items():
        (folder / name).write_bytes(content)
    return f"text:{folder}/*"


def make(
    folder: pathlib.Path, documents: dict[str, bytes], out: str = "corpus", **settings: Any
) -> Manifest:
    source = write_documents(folder / "documents", documents)
    settings = {"sequence_length": 8, "held_out": HELD_OUT} | settings
    return prepare(source=source, out=folder / out, **settings)


def with_sequences(folder: pathlib.Path, num_sequences: int, **settings: Any) -> Corpus:
    """A corpus of `num_sequences` train sequences of 8 targets, and one held-out one."""
    contents = {
        "train": document("train", 8 * num_sequences - 1),
        "held_out": document("held_out", 8),
    }
    make(folder, contents, **settings)
    corpus = Corpus.open(folder / "corpus")
    assert corpus.num_sequences("train") == num_sequences
    return corpus
