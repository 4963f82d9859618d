"""A corpus with garbage at known places, to see what a run does when it meets it."""

from __future__ import annotations

import collections.abc
import hashlib
import os
import pathlib
import shutil
from typing import Literal

import numpy as np
from array_record.python import array_record_module

from palm_jax.corpus import manifest
from palm_jax.corpus.manifest import Manifest
from palm_jax.corpus.packing import WRITER_OPTIONS
from palm_jax.corpus.reader import Corpus
from palm_jax.errors import WrongInput


def plant(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    ids: collections.abc.Iterable[int],
    seed: int = 0,
    kind: Literal["random", "cipher"] = "random",
) -> Manifest:
    """Copy the corpus `source` to `out` with other tokens in some sequences.

    Args:
      ids: sequences of the split train, as from data.sequence_ids.
      kind: "random": tokens drawn uniformly; "cipher": each token of the text replaced by one
        that stands for it throughout, so that there is something wrong to learn.
    Raises:
      WrongInput: `out` exists, or there is no such sequence.
    """
    folder = manifest.local_folder(out, "out")
    if folder.exists():
        raise WrongInput(f"{folder} exists; name a new folder")
    with Corpus.open(source) as corpus:
        described, split = corpus.manifest, corpus.manifest.splits["train"]
        shutil.copytree(corpus.folder, folder)
        chosen = np.unique(np.fromiter(ids, np.int64))
        tokens = corpus.read("train", range(split.sequences))
        corpus.read("train", chosen)  # all of them exist
    noise = np.random.default_rng(seed)
    size = described.vocabulary_size
    if kind == "random":
        tokens[chosen] = noise.integers(0, size, (len(chosen), tokens.shape[1]))
    else:
        tokens[chosen] = noise.permutation(size).astype(tokens.dtype)[tokens[chosen]]

    shards, first = [], 0
    for shard in split.shards:
        path = folder / shard.file
        _write(path, tokens[first : first + shard.sequences].astype(f"<{_code(described)}"))
        shards.append(shard.model_copy(update={"sha256": manifest.file_sha256(path)}))
        first += shard.sequences
    # Of the targets, which sequences no longer share with their neighbours.
    changed = split.model_copy(
        update={
            "shards": tuple(shards),
            "tokens_sha256": hashlib.sha256(tokens.astype("<i4").tobytes()).hexdigest(),
        }
    )
    splits = {**described.splits, "train": changed}
    digest = manifest.corpus_digest(described.tokenizer, described.sequence_length, splits)
    made = described.model_copy(update={"splits": splits, "digest": digest})
    manifest.write(folder, made)
    return made


def _code(described: Manifest) -> str:
    return np.dtype(described.dtype).str[1:]


def _write(path: pathlib.Path, rows: np.ndarray) -> None:
    path.unlink()
    writer = array_record_module.ArrayRecordWriter(str(path), WRITER_OPTIONS)
    try:
        for row in rows:
            writer.write(row.tobytes())
    finally:
        writer.close()
