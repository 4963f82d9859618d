"""Open what a config names to train on: one corpus, or the several of a mixture as one."""

# L sequence length

from __future__ import annotations

import collections.abc
import contextlib
import dataclasses
import pathlib

import numpy as np
import numpy.typing as npt

from palm_jax import config
from palm_jax.corpus import joint, manifest
from palm_jax.corpus.joint import Contents
from palm_jax.corpus.reader import Corpus, DocumentSpan
from palm_jax.errors import WrongInput


class Corpora:
    """Several corpora, open for reading as one: ids run on from each to the next.

    Raises:
      WrongInput: they differ in what the rows of a batch must have in common.
    """

    def __init__(self, corpora: dict[str, Corpus]) -> None:
        self.corpora = corpora
        self.manifest = joint.joined({name: one.manifest for name, one in corpora.items()})
        # In messages about all of them.
        self.folder = next(iter(corpora.values())).folder

    @classmethod
    def open(cls, folders: collections.abc.Mapping[str, str]) -> Corpora:
        """Open the corpora in folders by their names; errors as in `Corpus.open`."""
        with contextlib.ExitStack() as stack:
            opened = {}
            for name, folder in folders.items():
                with _named(name):
                    opened[name] = stack.enter_context(Corpus.open(folder))
            corpora = cls(opened)
            stack.pop_all()
        return corpora

    def close(self) -> None:
        for corpus in self.corpora.values():
            corpus.close()

    def __enter__(self) -> Corpora:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def sequence_length(self) -> int:
        """Targets per sequence; a sequence has one token more."""
        return self.manifest.sequence_length

    def num_sequences(self, split: str) -> int:
        return sum(corpus.num_sequences(split) for corpus in self.corpora.values())

    def read(
        self, split: str, ids: collections.abc.Sequence[int] | npt.NDArray[np.integer]
    ) -> npt.NDArray[np.int32]:
        """The sequences of `ids`, in that order: i32[len(ids), L+1]; errors as in `Corpus.read`."""
        wanted = np.asarray(ids, np.int64).reshape(-1)
        for strange in wanted[(wanted < 0) | (wanted >= self.num_sequences(split))][:1]:
            self.place(split, int(strange))
        tokens = np.empty((wanted.size, self.sequence_length + 1), np.int32)
        for name, own in self._id_ranges(split).items():
            rows = np.flatnonzero((wanted >= own.start) & (wanted < own.stop))
            if rows.size:
                with _named(name):
                    tokens[rows] = self.corpora[name].read(split, wanted[rows] - own.start)
        return tokens

    def place(self, split: str, sequence_id: int) -> tuple[str, int]:
        """The corpus of a sequence, and its id there.

        Raises:
          WrongInput: there is no such split or sequence.
        """
        for name, own in self._id_ranges(split).items():
            if sequence_id in own:
                return name, sequence_id - own.start
        raise WrongInput(
            f"sequence {sequence_id} of split {split} does not exist: {', '.join(self.corpora)} "
            f"have {self.num_sequences(split)}, from 0"
        )

    def documents(self, split: str, sequence_id: int) -> list[DocumentSpan]:
        """The documents in one sequence, their names after that of the corpus; as in `Corpus`."""
        name, own_id = self.place(split, sequence_id)
        with _named(name):
            spans = self.corpora[name].documents(split, own_id)
        return [dataclasses.replace(span, name=f"{name}: {span.name}") for span in spans]

    def verify(self) -> None:
        """Compare every file's SHA-256 with the manifests; errors as in `Corpus.verify`."""
        for name, corpus in self.corpora.items():
            with _named(name):
                corpus.verify()

    def decode(self, row: npt.NDArray[np.integer]) -> str:
        """Tokens as text to look at, as in `Corpus`."""
        return next(iter(self.corpora.values())).decode(row)

    def _id_ranges(self, split: str) -> dict[str, range]:
        self.num_sequences(split)  # raises where there is no such split
        ranges = joint.id_ranges(self.manifest, split)
        return {name: own for name, own in ranges.items() if name is not None}


def open_corpus(settings: config.Data) -> Corpus | Corpora:
    """Open what `settings` name; errors as in `Corpus.open`."""
    if settings.mixture is not None:
        return Corpora.open(settings.mixture.corpora)
    assert settings.corpus is not None
    return Corpus.open(settings.corpus)


def contents(settings: config.Data) -> Contents:
    """What the manifests of `settings` say, with no shard opened.

    Raises:
      WrongInput: one is missing or damaged, or corpora do not go together.
    """
    if settings.mixture is None:
        return manifest.read(pathlib.Path(str(settings.corpus)))
    manifests = {}
    for name, folder in settings.mixture.corpora.items():
        with _named(name):
            manifests[name] = manifest.read(pathlib.Path(folder))
    return joint.joined(manifests)


def are_there(settings: config.Data) -> bool:
    """Whether there is something at all places where corpora should be."""
    return all(pathlib.Path(place).exists() for place in settings.places.values())


@contextlib.contextmanager
def _named(name: str) -> collections.abc.Iterator[None]:
    """A refusal says which corpus it is about."""
    try:
        yield
    except WrongInput as error:
        told = str(error).removeprefix("data.corpus=")
        raise WrongInput(f"data.mixture.corpora.{name}: {told}") from error
