"""Documents of a dataset that tensorflow_datasets has prepared, read without TensorFlow."""

from __future__ import annotations

import collections.abc
import dataclasses
import pathlib
import re
from typing import Any

from palm_jax.corpus.sources import Document, Unit
from palm_jax.errors import WrongInput

BATCH = 256  # records read at a time

_NAME = re.compile(
    r"(?P<name>\w+)(/(?P<config>[\w.\-+]+))?(:(?P<version>\d+\.\d+\.\d+))?"
    r"(@(?P<split>\w+))?(#(?P<field>\w+))?"
)


@dataclasses.dataclass(frozen=True)
class Records:
    """The records [start, stop) of a split: one of its shards."""

    name: str
    num_bytes: int
    folder: pathlib.Path
    split: str
    field: str
    start: int
    stop: int

    @property
    def stamp(self) -> str:
        return f"{self.num_bytes}/{self.stop - self.start}"

    def documents(self) -> collections.abc.Iterator[tuple[Document, int]]:
        try:
            records = _open(self.folder, self.split, self.field)
            for first in range(self.start, self.stop, BATCH):
                some = range(first, min(first + BATCH, self.stop))
                for number, record in zip(some, records.__getitems__(list(some)), strict=True):
                    text = record[self.field]
                    content = text.encode() if isinstance(text, str) else bytes(text)
                    done = (number + 1 - self.start) * self.num_bytes // (self.stop - self.start)
                    yield Document(f"{self.name}#{number}", content), done
        except (OSError, RuntimeError, ValueError) as error:
            raise WrongInput(f"cannot read split {self.split} of {self.folder}: {error}") from error


def units_of(name: str, data_dir: str | None) -> list[Unit]:
    """The shards of the dataset `NAME[/CONFIG][:VERSION][@SPLIT][#FIELD]` in `data_dir`.

    Raises:
      WrongInput: it is not there, or not as array_record, or has no such split or field.
    """
    import tensorflow_datasets as tfds

    source = f"source=tfds:{name}"
    found = _NAME.fullmatch(name)
    if found is None:
        raise WrongInput(
            f"{source} is not tfds:NAME[/CONFIG][:VERSION][@SPLIT][#FIELD] with a version like "
            "1.0.0"
        )
    if data_dir is None:
        raise WrongInput(f"{source} needs data_dir, the folder of prepared datasets")
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", data_dir):
        raise WrongInput(
            f"data_dir={data_dir} is a URL, and array_record reads files; mount the bucket "
            "(gcsfuse) and name the mounted folder"
        )
    split, field = found["split"] or "train", found["field"] or "text"
    folder = _version(
        pathlib.Path(data_dir, found["name"], found["config"] or ""), found["version"], source
    )
    try:
        info = tfds.builder_from_directory(str(folder)).info
    except (OSError, RuntimeError, ValueError) as error:
        raise WrongInput(f"{source}: cannot read {folder}: {error}") from error
    if info.file_format.value != "array_record":
        raise WrongInput(
            f"{source}: {folder} is stored as {info.file_format.value}, which has no random "
            f"access; convert it: python -m tensorflow_datasets.scripts.convert_format "
            f"--dataset_version_dir={folder} --out_file_format=array_record --out_dir=..."
        )
    if split not in info.splits:
        raise WrongInput(
            f"{source} has no split {split!r}; there are: {', '.join(sorted(info.splits))}"
        )
    features = info.features.items()
    texts = sorted(key for key, kind in features if isinstance(kind, tfds.features.Text))
    if field not in texts:
        raise WrongInput(
            f"{source} has no text in field {field!r}; there are: {', '.join(texts) or 'none'}"
        )
    lengths = info.splits[split].shard_lengths
    size = info.splits[split].num_bytes
    label = "/".join(folder.relative_to(data_dir).parts)
    units: list[Unit] = []
    start = 0
    for length in lengths:
        share = size * length // max(1, sum(lengths))
        units.append(
            Records(f"{label}@{split}", share, folder, split, field, start, start + length)
        )
        start += length
    return units


def _version(folder: pathlib.Path, version: str | None, source: str) -> pathlib.Path:
    there = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    versions = sorted(
        (name for name in there if re.fullmatch(r"\d+\.\d+\.\d+", name)),
        key=lambda name: [int(part) for part in name.split(".")],
    )
    if version is None and versions:
        return folder / versions[-1]
    if version in versions:
        return folder / version
    what = f"the versions {', '.join(versions)}" if versions else ", ".join(sorted(there)[:10])
    raise WrongInput(
        f"{source}: {folder} has no "
        + (f"version {version}" if version else "prepared version")
        + f"; it {f'holds {what}' if there else 'does not exist'}"
    )


def _open(folder: pathlib.Path, split: str, field: str) -> Any:
    import tensorflow_datasets as tfds

    builder = tfds.builder_from_directory(str(folder))
    # Pictures and whatever else there is are not decoded.
    others = {name: tfds.decode.SkipDecoding() for name in builder.info.features if name != field}
    return builder.as_data_source(split=split, decoders=others or None)
