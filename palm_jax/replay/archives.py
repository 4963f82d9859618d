"""Taking a bundle out of its archive."""

from __future__ import annotations

import pathlib
import tarfile

from palm_jax.errors import WrongInput

ARCHIVE = ".tar.gz"


def unpacked(path: pathlib.Path, into: pathlib.Path) -> pathlib.Path:
    """The folder of a bundle, taken out of its archive if it is in one.

    Raises:
      WrongInput: the archive is none, or holds anything but one folder of plain files; nothing
        is written outside `into`.
    """
    if not path.is_file():
        return path
    try:
        with tarfile.open(path) as archive:
            archive.extractall(into, filter="data")
    except (tarfile.TarError, OSError, EOFError) as error:
        raise WrongInput(f"{path} is not a bundle: {error}") from error
    folders = [p for p in into.iterdir() if p.is_dir()]
    if len(folders) != 1:
        raise WrongInput(f"{path} is not a bundle: it holds {len(folders)} folders, not one")
    return folders[0]
