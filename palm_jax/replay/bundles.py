"""Bundles: a range of a run's steps with all that a replay needs, to carry to another machine.

A bundle is a run folder of its own: the config, the state before its first step as a
checkpoint, the records of its steps, and in place of the corpus just the rows they read. So
`palm-jax replay BUNDLE --steps A:B` works as on the run. It holds data only, and nothing from
it is executed.
"""

from __future__ import annotations

import collections.abc
import contextlib
import pathlib
import struct
import tarfile
import tempfile
import zipfile
from typing import Any

import numpy as np
import numpy.typing as npt

from palm_jax import config, data, files, sharding
from palm_jax.corpus import arrays
from palm_jax.corpus.corpora import Corpora, open_corpus
from palm_jax.corpus.joint import Contents
from palm_jax.corpus.reader import Corpus
from palm_jax.course import Course
from palm_jax.errors import CannotDo, WrongInput
from palm_jax.record import folder, logbook, segments
from palm_jax.record.checkpoints import Checkpoints
from palm_jax.record.folder import RunFolder
from palm_jax.replay import states
from palm_jax.replay.archives import ARCHIVE

ROWS = "rows.npz"
# What zipfile may say of a file.
_DAMAGED = (
    *(zipfile.BadZipFile, zipfile.LargeZipFile, EOFError, KeyError, NotImplementedError),
    *(RuntimeError, struct.error),
)
_NAMES = {"train": ("ids", "tokens"), "held_out": ("held_out_ids", "held_out_tokens")}


class BundledRows:
    """The rows of a corpus that a bundle carries; reads like the corpus."""

    def __init__(self, path: pathlib.Path, manifest: Contents) -> None:
        self.folder, self.manifest = path.parent, manifest
        self._tokens: dict[str, npt.NDArray[Any]] = {}
        self._places: dict[str, dict[int, int]] = {}
        try:
            for split, (ids, tokens) in _read_rows(path, manifest).items():
                self._places[split] = {sequence: n for n, sequence in enumerate(ids.tolist())}
                self._tokens[split] = tokens
        except (*_DAMAGED, OSError, ValueError) as error:
            raise CannotDo(f"{path} is damaged: {error}; copy the bundle again") from error
        if "train" not in self._places:
            raise CannotDo(f"{path} is damaged: it has no rows; copy the bundle again")

    def __enter__(self) -> BundledRows:
        return self

    def __exit__(self, *error: object) -> None:
        return None

    def num_sequences(self, split: str) -> int:
        return self.manifest.splits[split].sequences

    def read(
        self, split: str, ids: collections.abc.Sequence[int] | npt.NDArray[np.integer]
    ) -> npt.NDArray[np.int32]:
        """As `Corpus.read`, for the rows in the bundle.

        Raises:
          WrongInput: it does not carry one of them.
        """
        wanted, places = [int(sequence) for sequence in ids], self._places.get(split, {})
        for sequence in wanted:
            if sequence not in places:
                raise WrongInput(
                    f"{self.folder} does not carry sequence {sequence} of split {split}; it can "
                    "execute its own steps only"
                )
        return self._tokens[split][[places[sequence] for sequence in wanted]].astype(np.int32)


_Rows = tuple[npt.NDArray[np.integer], npt.NDArray[np.integer]]  # (ids, tokens)


def _read_rows(path: pathlib.Path, manifest: Contents) -> dict[str, _Rows]:
    """{split: (ids, tokens)}. Errors of many kinds; but nothing is read that could be too large."""
    found = {}
    with files.opened(path) as file, zipfile.ZipFile(file) as archive:
        there = set(archive.namelist())
        for split, (ids, tokens) in _NAMES.items():
            if f"{ids}.npy" in there:
                found[split] = _read_array(archive, ids), _read_array(archive, tokens)
                _check_rows(*found[split], split, manifest)
    return found


def _read_array(archive: zipfile.ZipFile, name: str) -> npt.NDArray[np.integer]:
    part = archive.getinfo(f"{name}.npy")
    # np.savez does not compress. Compressed, a small file could fill the memory.
    if part.compress_type != zipfile.ZIP_STORED or part.file_size > part.compress_size:
        raise ValueError(f"{name} is not stored as it is")
    with archive.open(part) as file:
        dtype, shape, _ = arrays.header(file, part.file_size)
        return np.frombuffer(file.read(), dtype).reshape(shape)


def _check_rows(ids: Any, tokens: Any, split: str, manifest: Contents) -> None:
    shape = (len(ids) if ids.ndim == 1 else -1, manifest.sequence_length + 1)
    if tokens.shape != shape:
        raise ValueError(f"{split}: {tokens.dtype} of shape {tokens.shape} is no rows of tokens")
    num_sequences = manifest.splits[split].sequences
    if len(ids) and not (ids.min() >= 0 and ids.max() < num_sequences):
        raise ValueError(f"{split}: it has ids beyond the corpus's {num_sequences} sequences")
    # An id beyond the table would be clamped by the embedding without a word.
    if len(ids) and not (tokens.min() >= 0 and tokens.max() < manifest.vocabulary_size):
        raise ValueError(f"{split}: it has tokens beyond the {manifest.vocabulary_size} there are")


def create(
    run: RunFolder,
    start: int,
    stop: int,
    out: str,
    *,
    corpus: data.Rows,
    segment: int | None = None,
) -> pathlib.Path:
    """Write a bundle of steps [start, stop) to `out`: a folder, or an archive if it ends so.

    Raises:
      WrongInput: the steps are not in the logbook, or `out` exists.
      CannotDo: it cannot be written.
    """
    settings = run.config()
    number = run.last_segment() if segment is None else segment
    described = segments.read(run.segment(number))
    mesh = sharding.make_mesh(settings.mesh)
    course = Course(settings, described, corpus, mesh)
    records = _records(run, number, start, stop)
    with written(out) as bundle:
        found = states.state_before(run, course, start)
        # It begins with the state that it carries, wherever the run had that from.
        first = described.model_copy(update={"segment": 0, "parent": None, "start_step": start})
        folder.create(bundle, settings, run.manifest(), first)
        with Checkpoints(bundle.checkpoints(0), settings.checkpoint) as saved:
            digest = saved.save(start, found.state, {"segment": 0}, None)
        with logbook.Logbook.open(bundle.path) as book:
            for record in records:
                kept = {k: v for k, v in record.items() if k not in ("event", "time")}
                book.append(record["event"], **kept | {"segment": 0})
            book.append("checkpoint", segment=0, step=start, state_digest=digest.whole)
        ids: set[int] = set()
        with course.batches(start, stop) as batches:
            for _, batch in batches:
                ids.update(batch.sequence_ids.tolist())
        write_rows(bundle, corpus, {"train": ids})
    return pathlib.Path(out).absolute()


def write_rows(
    bundle: RunFolder, corpus: data.Rows, wanted: collections.abc.Mapping[str, set[int]]
) -> None:
    """Give a bundle the rows of `wanted`, by split."""
    columns: dict[str, Any] = {}
    for split, ids in wanted.items():
        ordered = sorted(ids)
        names = _NAMES[split]
        columns[names[0]] = np.array(ordered, np.int64)
        columns[names[1]] = corpus.read(split, ordered).astype(np.dtype(corpus.manifest.dtype))
    np.savez(bundle.path / ROWS, **columns)


@contextlib.contextmanager
def written(out: str) -> collections.abc.Iterator[RunFolder]:
    """A folder to fill, which becomes `out`: as it is, or as an archive if the name ends so.

    Raises:
      WrongInput: `out` exists.
      CannotDo: it cannot be written.
    """
    target = pathlib.Path(out).absolute()
    if target.exists():
        raise WrongInput(f"--out {out} exists; name a new folder or archive")
    with tempfile.TemporaryDirectory(dir=_existing_parent(target)) as scratch:
        bundle = RunFolder(pathlib.Path(scratch) / target.name.removesuffix(ARCHIVE))
        yield bundle
        try:
            if target.name.endswith(ARCHIVE):
                whole = pathlib.Path(scratch) / target.name
                with tarfile.open(whole, "w:gz") as archive:
                    archive.add(bundle.path, arcname=bundle.path.name)
                whole.rename(target)
            else:
                bundle.path.rename(target)
        except OSError as error:
            raise CannotDo(f"cannot write the bundle {out}: {error}") from error


def _existing_parent(target: pathlib.Path) -> pathlib.Path:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CannotDo(f"cannot write the bundle {target}: {error}; name another") from error
    return target.parent


def _records(run: RunFolder, segment: int, start: int, stop: int) -> list[dict[str, Any]]:
    """The starts, programs, steps and checkpoint digests that a replay compares with."""
    kept: list[dict[str, Any]] = []
    steps: set[int] = set()
    for record in logbook.scan(run.path):
        if not isinstance(record, dict):
            continue
        event = record["event"]
        if event == "start":
            kept.append(record)
        elif record.get("segment") != segment:
            continue
        elif event == "program":
            kept.append(record)
        elif event == "step" and start <= record["step"] < stop:
            kept.append(record)
            steps.add(record["step"])
        elif event == "checkpoint":
            logbook.required(record, run.path, step=int)
            if start < record["step"] <= stop:
                kept.append(record)
    missing = next((step for step in range(start, stop) if step not in steps), None)
    if missing is not None:
        raise WrongInput(f"the logbook of {run.path} has no record of step {missing}")
    return kept


def open_rows(run: RunFolder, settings: config.Config) -> Corpus | Corpora | BundledRows:
    """What a run's steps are read from: its corpora, or the rows that its bundle carries."""
    if (run.path / ROWS).is_file():
        return BundledRows(run.path / ROWS, run.manifest())
    return open_corpus(settings.data)
