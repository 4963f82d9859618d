"""Taking a bundle out of its archive."""

from __future__ import annotations

import gzip
import pathlib
import shutil
import tarfile
import zlib
from typing import IO

from palm_jax import files
from palm_jax.errors import WrongInput

ARCHIVE = ".tar.gz"
_MOST_MEMBERS = 100_000
_DEEPEST = 50  # folders within each other
_MOST_AT_ONCE = 2**20  # bytes; what tarfile reads in one piece are headers, long names among them


def unpacked(path: pathlib.Path, into: pathlib.Path) -> pathlib.Path:
    """The folder of a bundle, taken out of its archive if it is in one.

    Raises:
      WrongInput: the archive is none, or holds anything but one folder of plain files, each
        once, that the disk has room for; nothing is written outside `into`.
    """
    if not path.is_file():
        return path
    try:
        with files.opened(path) as packed, gzip.open(packed) as content:
            _extract(content, into)
    except (tarfile.TarError, OSError, EOFError, ValueError, zlib.error) as error:
        raise WrongInput(f"{path} is not a bundle: {error}") from error
    found = [*into.iterdir()]
    if len(found) != 1 or not found[0].is_dir():
        raise WrongInput(f"{path} is not a bundle: it holds {len(found)} parts, not one folder")
    return found[0]


class _Forward:
    """What tarfile reads from: onwards only, and never more at once than a header may need.

    A member may say that it has a name of a terabyte, or that it ends before it begins; tarfile
    would make room for the one and go round and round with the other.
    """

    def __init__(self, content: gzip.GzipFile) -> None:
        self._content = content

    def read(self, size: int) -> bytes:
        if not 0 <= size <= _MOST_AT_ONCE:
            raise OSError(f"a header of {size:,} bytes")
        return self._content.read(size)

    def tell(self) -> int:
        return self._content.tell()

    def seek(self, place: int) -> int:
        if place < self._content.tell():
            raise OSError("a member that ends before it begins")
        return self._content.seek(place)


def _extract(content: gzip.GzipFile, into: pathlib.Path) -> None:
    """Not by extractall: that takes links, and a name a second time."""
    room, num_members = shutil.disk_usage(into).free, 0
    forward: IO[bytes] = _Forward(content)  # type: ignore[assignment]
    with tarfile.open(fileobj=forward, mode="r:") as archive:
        while (member := archive.next()) is not None:
            # tarfile keeps all of them, for whoever asks again.
            archive.members = []  # type: ignore[attr-defined]
            target = into.joinpath(*_parts(member.name))
            num_members, room = num_members + 1, room - max(member.size, 0)
            if num_members > _MOST_MEMBERS or room < 0:
                raise OSError("it holds more than this disk has room for")
            if member.issparse():
                raise OSError(f"{member.name[:200]!r} has holes")
            if member.isdir():
                target.mkdir(parents=True, exist_ok=True)
            elif member.type in (tarfile.REGTYPE, tarfile.AREGTYPE):
                target.parent.mkdir(parents=True, exist_ok=True)
                with target.open("xb") as file:
                    _copy(archive.extractfile(member), file, member.size)
            else:
                raise OSError(f"{member.name[:200]!r} is neither a plain file nor a folder")
    # The checksum of what was unpacked stands at the very end, after tar's own padding.
    padding = 0
    while piece := content.read(_MOST_AT_ONCE):
        padding += len(piece)
        if padding > _MOST_AT_ONCE:
            raise OSError("something follows after its end")


def _parts(name: str) -> list[str]:
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if name.startswith("/") or ".." in parts or not 0 < len(parts) <= _DEEPEST:
        raise OSError(f"{name[:200]!r} lies outside of the archive's folder")
    return parts


def _copy(source: IO[bytes] | None, target: IO[bytes], size: int) -> None:
    assert source is not None, "a plain file has content"
    while piece := source.read(min(size, _MOST_AT_ONCE)):
        target.write(piece)
        size -= len(piece)
    if size:
        raise OSError("it ends within a file")
