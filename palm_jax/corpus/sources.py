"""Where documents come from: a source names its documents and gives their bytes, in order.

The order is that of the names, never that of the file system, so that a source gives the
same documents in the same order on every machine. A source is a list of units, each read from
beginning to end by one process: machines that share the work divide the units.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import glob
import io
import json
import os
import pathlib
import re
import sysconfig
from typing import IO, BinaryIO, Protocol

import pyarrow

from palm_jax.errors import CannotDo, WrongInput

# Read at a time from a file that is split at separators, or decompressed.
CHUNK_BYTES = 16 * 2**20
# What a source's files may be compressed by.
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
KINDS = "stdlib, text:GLOB, jsonl:GLOB[:FIELD], tfds:NAME[/CONFIG][:VERSION][@SPLIT][#FIELD]"

# The test packages are as big as the library itself and hold deliberately broken sources.
_STDLIB_WITHOUT = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
# Written when Python was built or installed, so they differ between machines.
_STDLIB_MACHINE_FILE = re.compile(r"_sysconfigdata.*|sitecustomize\.py|usercustomize\.py")
_STDLIB_MACHINE_FOLDER = re.compile(r"config-.*")


@dataclasses.dataclass(frozen=True)
class Document:
    name: str
    content: bytes


class Unit(Protocol):
    """A stretch of a source: a file, or a shard of records."""

    @property
    def name(self) -> str: ...

    @property
    def num_bytes(self) -> int:
        """Its size where it lies, compressed or not."""

    @property
    def stamp(self) -> str:
        """Differs, as far as one can tell without reading, once the content does."""

    def documents(self) -> collections.abc.Iterator[tuple[Document, int]]:
        """Every document, the empty ones too, and how many of `num_bytes` are read by then.

        Raises:
          WrongInput: it cannot be read, or holds something else; the message says where.
        """


@dataclasses.dataclass(frozen=True)
class File:
    """A unit that is a file."""

    name: str
    path: pathlib.Path

    @property
    def num_bytes(self) -> int:
        return self.path.stat().st_size if self.path.exists() else 0

    @property
    def stamp(self) -> str:
        if not self.path.exists():
            return "missing"
        found = self.path.stat()
        return f"{found.st_size}/{found.st_mtime_ns}"


@dataclasses.dataclass(frozen=True)
class TextFile(File):
    """A file that is one document, or several where a separator divides it."""

    separator: bytes | None = None

    def documents(self) -> collections.abc.Iterator[tuple[Document, int]]:
        try:
            with self.path.open("rb") as file:
                if self.separator is None:
                    content = file.read()
                    yield Document(self.name, content), len(content)
                    return
                for number, content in enumerate(split_stream(file, self.separator)):
                    yield Document(f"{self.name}#{number}", content), file.tell()
        except OSError as error:
            raise WrongInput(f"cannot read the document file {self.path}: {error}") from error


@dataclasses.dataclass(frozen=True)
class JsonLines(File):
    """A file with an object a line, each a document in its field `field`."""

    field: str

    def documents(self) -> collections.abc.Iterator[tuple[Document, int]]:
        try:
            with pyarrow.OSFile(os.fspath(self.path)) as file, _decompressed(file, self.path) as f:
                for number, line in enumerate(f, 1):
                    if line.isspace():
                        continue
                    yield Document(f"{self.name}:{number}", self._text(line, number)), file.tell()
        except OSError as error:
            raise WrongInput(f"cannot read {self.path}: {error}") from error

    def _text(self, line: bytes, number: int) -> bytes:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise WrongInput(f"{self.path}, line {number} is not JSON: {error}") from None
        if not isinstance(record, dict):
            raise WrongInput(f"{self.path}, line {number} is no JSON object: {record!r:.60}")
        if self.field not in record:
            raise WrongInput(
                f"{self.path}, line {number} has no field {self.field!r}; it has: "
                f"{', '.join(record)[:200] or 'none'}. Name one: jsonl:{self.path}:FIELD"
            )
        text = record[self.field]
        if not isinstance(text, str):
            raise WrongInput(
                f"{self.path}, line {number}: field {self.field!r} is no text: {text!r:.60}"
            )
        # JSON can spell half of a surrogate pair, which is no UTF-8: its three bytes are kept.
        return text.encode("utf-8", errors="surrogatepass")


def _decompressed(file: pyarrow.NativeFile, path: pathlib.Path) -> IO[bytes]:
    kind = COMPRESSIONS.get(path.suffix)
    stream = file if kind is None else pyarrow.CompressedInputStream(file, kind)
    return io.BufferedReader(stream, CHUNK_BYTES)


@dataclasses.dataclass(frozen=True)
class Source:
    """The units of all sources of a corpus, in order."""

    units: tuple[Unit, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes that reading it all takes from where it lies."""
        return sum(unit.num_bytes for unit in self.units)

    def documents(self) -> collections.abc.Iterator[Document]:
        for unit in self.units:
            for document, _ in unit.documents():
                yield document


def open_source(
    source: str | collections.abc.Iterable[str],
    document_separator: str | None = None,
    data_dir: str | None = None,
) -> Source:
    """Find the documents of one source, or of several.

    Args:
      source: each of them
        `stdlib`: the .py files of the running Python's standard library;
        `text:GLOB`: files, where `**` stands for any depth of folders;
        `jsonl:GLOB[:FIELD]`: files with a JSON object a line, plain, .gz or .zst; the
          documents are in FIELD (text), letters, digits and underscores after a colon;
        `tfds:NAME[/CONFIG][:VERSION][@SPLIT][#FIELD]`: a prepared dataset in `data_dir`,
          of its newest version, split train and field text unless said.
      document_separator: splits each file of `text:` into documents. The documents joined
        by it are the file again, so a separator at the end of a file makes an empty one.
      data_dir: where tensorflow_datasets prepared its datasets.
    Raises:
      WrongInput: there is no such source, or it has no files.
      CannotDo: this Python comes without the sources of its standard library.
    """
    from palm_jax.corpus import tfds_records

    names = [source] if isinstance(source, str) else list(source)
    if not names:
        raise WrongInput(f"source is missing; there are: {KINDS}")
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise WrongInput(f"source={twice} is given twice; leave one out")
    if document_separator is not None and not any(name.startswith("text:") for name in names):
        raise WrongInput(
            f"document_separator={document_separator!r} does not apply to "
            f"source={', '.join(names)}; it splits the files of text:GLOB. Leave it out"
        )
    if document_separator == "":
        raise WrongInput("document_separator is empty; leave it out, or give some text")
    if data_dir is not None and not any(name.startswith("tfds:") for name in names):
        raise WrongInput(
            f"data_dir={data_dir} is for source=tfds:..., and there is none; leave it out"
        )
    units: list[Unit] = []
    for name in names:
        kind, colon, rest = name.partition(":")
        if kind == "stdlib" and not colon:
            library = pathlib.Path(sysconfig.get_path("stdlib"))
            units += [TextFile(*file) for file in _standard_library(library)]
        elif kind == "text" and rest:
            separator = None if document_separator is None else document_separator.encode()
            units += [TextFile(*file, separator) for file in _matching(kind, rest)]
        elif kind == "jsonl" and rest:
            found = re.fullmatch(r"(.+):(\w+)", rest)
            pattern, field = found.groups() if found else (rest, "text")
            units += [JsonLines(*file, field) for file in _matching(kind, pattern)]
        elif kind == "tfds" and rest:
            units += tfds_records.units_of(rest, data_dir)
        else:
            raise WrongInput(f"source={name!r} does not exist; there are: {KINDS}")
    return Source(tuple(units))


def split_stream(
    file: BinaryIO | io.BytesIO, separator: bytes, chunk_bytes: int = CHUNK_BYTES
) -> collections.abc.Iterator[bytes]:
    """`file.read().split(separator)`, holding one document and one chunk at a time."""
    rest = b""
    while chunk := file.read(chunk_bytes):
        *whole, rest = (rest + chunk).split(separator)
        yield from whole
    yield rest


def _standard_library(root: pathlib.Path) -> tuple[tuple[str, pathlib.Path], ...]:
    found = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [
            name
            for name in subfolders
            if name not in _STDLIB_WITHOUT and not _STDLIB_MACHINE_FOLDER.fullmatch(name)
        ]
        found += [
            pathlib.Path(folder, name)
            for name in names
            if name.endswith(".py") and not _STDLIB_MACHINE_FILE.fullmatch(name)
        ]
    if not found:
        raise CannotDo(
            "source=stdlib: this Python has no source files of its standard library; "
            "use a Python that has, or source=text:GLOB"
        )
    return _by_name(found, root)


def _matching(kind: str, pattern: str) -> tuple[tuple[str, pathlib.Path], ...]:
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", pattern):
        raise WrongInput(f"source={kind}:{pattern} is a URL; copy the files here first")
    matches = map(pathlib.Path, glob.iglob(pattern, recursive=True))
    found = [path for path in matches if path.is_file()]
    if not found:
        raise WrongInput(
            f"source={kind}:{pattern} matches no file; check the pattern (and quote it)"
        )
    # Names start where the wildcards do: they should not tell where a machine keeps its data.
    parts = pathlib.Path(pattern).parts
    fixed = next((i for i, part in enumerate(parts) if glob.has_magic(part)), len(parts) - 1)
    return _by_name(found, pathlib.Path(*parts[:fixed]))


def _by_name(
    paths: collections.abc.Iterable[pathlib.Path], root: pathlib.Path
) -> tuple[tuple[str, pathlib.Path], ...]:
    return tuple(sorted((path.relative_to(root).as_posix(), path) for path in set(paths)))
