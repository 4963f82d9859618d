"""Where documents come from: a source names its documents and gives their bytes, in order.

The order is that of the names, never that of the file system, so that a source gives the
same documents in the same order on every machine.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import glob
import io
import os
import pathlib
import re
import sysconfig
from typing import BinaryIO

from palm_jax.errors import CannotDo, WrongInput

# Read at a time from a file that is split at separators.
CHUNK_BYTES = 16 * 2**20

# The test packages are as big as the library itself and hold deliberately broken sources.
_STDLIB_WITHOUT = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
# Written when Python was built or installed, so they differ between machines.
_STDLIB_MACHINE_FILE = re.compile(r"_sysconfigdata.*|sitecustomize\.py|usercustomize\.py")
_STDLIB_MACHINE_FOLDER = re.compile(r"config-.*")


@dataclasses.dataclass(frozen=True)
class Document:
    name: str
    content: bytes


@dataclasses.dataclass(frozen=True)
class Files:
    """Documents in files: one a file, or several where a separator divides it."""

    files: tuple[tuple[str, pathlib.Path], ...]  # (name, where), sorted by name
    separator: bytes | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes that `documents` will read, as far as is known beforehand."""
        return sum(path.stat().st_size for _, path in self.files if path.exists())

    def documents(self) -> collections.abc.Iterator[Document]:
        """Every document, the empty ones too.

        Raises:
          WrongInput: a file cannot be read.
        """
        for name, path in self.files:
            try:
                with path.open("rb") as file:
                    if self.separator is None:
                        yield Document(name, file.read())
                        continue
                    for number, content in enumerate(split_stream(file, self.separator)):
                        yield Document(f"{name}#{number}", content)
            except OSError as error:
                raise WrongInput(f"cannot read the document file {path}: {error}") from error


def open_source(source: str, document_separator: str | None = None) -> Files:
    """Find the documents of a source.

    Args:
      source: `stdlib`, the .py files of the running Python's standard library; or
        `text:GLOB`, files, where `**` stands for any depth of folders.
      document_separator: splits each file of `text:` into documents. The documents joined
        by it are the file again, so a separator at the end of a file makes an empty one.
    Raises:
      WrongInput: there is no such source, or it has no files.
      CannotDo: this Python comes without the sources of its standard library.
    """
    kind, colon, rest = source.partition(":")
    if kind == "stdlib" and not colon:
        if document_separator is not None:
            raise WrongInput(
                f"document_separator={document_separator!r} does not apply to source=stdlib, "
                "where a file is a document; leave it out"
            )
        return Files(_standard_library(pathlib.Path(sysconfig.get_path("stdlib"))))
    if kind == "text" and rest:
        if document_separator == "":
            raise WrongInput("document_separator is empty; leave it out, or give some text")
        separator = None if document_separator is None else document_separator.encode()
        return Files(_matching(rest), separator)
    raise WrongInput(f"source={source!r} does not exist; there are: stdlib, text:GLOB")


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


def _matching(pattern: str) -> tuple[tuple[str, pathlib.Path], ...]:
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", pattern):
        raise WrongInput(f"source=text:{pattern} is a URL; copy the files here first")
    matches = map(pathlib.Path, glob.iglob(pattern, recursive=True))
    found = [path for path in matches if path.is_file()]
    if not found:
        raise WrongInput(f"source=text:{pattern} matches no file; check the pattern (and quote it)")
    # Names start where the wildcards do: they should not tell where a machine keeps its data.
    parts = pathlib.Path(pattern).parts
    fixed = next((i for i, part in enumerate(parts) if glob.has_magic(part)), len(parts) - 1)
    return _by_name(found, pathlib.Path(*parts[:fixed]))


def _by_name(
    paths: collections.abc.Iterable[pathlib.Path], root: pathlib.Path
) -> tuple[tuple[str, pathlib.Path], ...]:
    return tuple(sorted((path.relative_to(root).as_posix(), path) for path in set(paths)))
