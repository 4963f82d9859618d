"""The manifest of several corpora that a mixture draws from, as one.

Sequence ids run on from corpus to corpus, in the config's order. Weights are settings of a run and
no part of the corpora, nor of their digest.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import hashlib
import itertools
import json
import pathlib
from typing import Annotated

import pydantic

from palm_jax import files
from palm_jax.corpus import manifest
from palm_jax.corpus.manifest import Manifest, Sha256
from palm_jax.errors import WrongInput

# What rows of one batch must have in common.
_SHARED = ("tokenizer", "vocabulary_size", "end_of_document", "dtype", "sequence_length")


@dataclasses.dataclass(frozen=True)
class Totals:
    """Of one split, over all corpora; as in `manifest.Split`."""

    documents: int
    bytes: int
    tokens: int
    sequences: int
    target_bytes: int


class JointManifest(pydantic.BaseModel):
    """Reads like the manifest of one corpus."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", strict=True)

    digest: Sha256  # see `joint_digest`
    corpora: Annotated[dict[str, Manifest], pydantic.Field(min_length=1)]

    @property
    def splits(self) -> dict[str, Totals]:
        return {
            split: Totals(
                *(
                    sum(getattr(one.splits[split], field.name) for one in self.corpora.values())
                    for field in dataclasses.fields(Totals)
                )
            )
            for split in manifest.SPLITS
        }

    @property
    def tokenizer(self) -> manifest.Tokenizer:
        return self._first.tokenizer

    @property
    def vocabulary_size(self) -> int:
        return self._first.vocabulary_size

    @property
    def end_of_document(self) -> int:
        return self._first.end_of_document

    @property
    def dtype(self) -> str:
        return self._first.dtype

    @property
    def sequence_length(self) -> int:
        return self._first.sequence_length

    @property
    def bigram_bits_per_byte(self) -> float | None:
        """Of all held-out text, each corpus by its own bigram model."""
        bits = 0.0
        for one in self.corpora.values():
            if one.bigram_bits_per_byte is None:
                return None
            bits += one.bigram_bits_per_byte * one.splits["held_out"].target_bytes
        return bits / self.splits["held_out"].target_bytes

    @property
    def _first(self) -> Manifest:
        return next(iter(self.corpora.values()))

    @pydantic.model_validator(mode="after")
    def _rows_are_alike(self) -> JointManifest:
        (name, first), *others = self.corpora.items()
        for other, contents in others:
            for entry in _SHARED:
                one, two = getattr(first, entry), getattr(contents, entry)
                if entry == "tokenizer":
                    one, two = one.identity, two.identity
                if one != two:
                    raise ValueError(
                        f"{name} has {entry}={one}, and {other} has {entry}={two}; prepare them "
                        "alike to draw from both"
                    )
        if self.digest != joint_digest(self.corpora):
            raise ValueError(f"digest={self.digest} is not that of the corpora")
        return self


Contents = Manifest | JointManifest


def joint_digest(corpora: collections.abc.Mapping[str, Manifest]) -> str:
    """Hash of the corpora's names and digests, in their order."""
    text = json.dumps([[name, contents.digest] for name, contents in corpora.items()])
    return hashlib.sha256(text.encode()).hexdigest()


def joined(corpora: dict[str, Manifest]) -> JointManifest:
    """The manifest of all.

    Raises:
      WrongInput: they differ in what the rows of a batch must have in common.
    """
    try:
        return JointManifest(digest=joint_digest(corpora), corpora=corpora)
    except pydantic.ValidationError as error:
        raise WrongInput(f"data.mixture: {error.errors()[0]['ctx']['error']}") from None


def id_ranges(contents: Contents, split: str) -> dict[str | None, range]:
    """The ids of each corpus by its name; of one alone, by None."""
    if isinstance(contents, Manifest):
        return {None: range(contents.splits[split].sequences)}
    sizes = [one.splits[split].sequences for one in contents.corpora.values()]
    edges = itertools.pairwise(itertools.accumulate(sizes, initial=0))
    return {name: range(*edge) for name, edge in zip(contents.corpora, edges, strict=True)}


def read(folder: pathlib.Path) -> Contents:
    """What a run's folder says of the corpus, or the corpora, that it was trained on.

    Raises:
      WrongInput: it is missing or no manifest.
    """
    path = folder / manifest.FILE_NAME
    if not _is_joint(path):
        return manifest.read(folder)
    try:
        return files.described(path, JointManifest)
    except (OSError, ValueError) as error:
        raise WrongInput(f"{path} is not a manifest of this version, {error}") from None


def _is_joint(path: pathlib.Path) -> bool:
    try:
        content = files.parsed(files.text(path))
    except (OSError, ValueError):
        return False  # `manifest.read` says what is wrong
    return isinstance(content, dict) and "corpora" in content
