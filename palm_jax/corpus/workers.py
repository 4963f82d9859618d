"""Documents tokenised by several processes, in their order.

Processes, because what a tokenizer's library does not do itself, lists of ids and their comparison
with the text, holds Python's lock. Groups of documents go to them and ids come back.
"""

from __future__ import annotations

import collections
import collections.abc
import concurrent.futures
import concurrent.futures.process
import hashlib
import multiprocessing
import os
import pathlib
import signal
import threading
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from palm_jax.corpus import manifest, sources, tokenizers
from palm_jax.errors import CannotDo, WrongInput


class Place(NamedTuple):
    """A document, where it comes from, and the bytes of the source that are read by then."""

    unit: int
    number: int
    document: sources.Document
    read: int


class Tokenised(NamedTuple):
    unit: int
    number: int
    name: str
    read: int  # as in `Place`
    num_bytes: int
    digest: bytes
    is_utf8: bool
    tokens: npt.NDArray[np.integer]


def content_digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).digest()


def tokenised(
    groups: collections.abc.Iterable[list[Place]],
    folder: pathlib.Path,
    described: manifest.Tokenizer,
    workers: int,
) -> collections.abc.Iterator[list[Tokenised]]:
    """The groups tokenised, in their order, with a bounded number in memory.

    Args:
      folder: where the tokenizer is that is `described`.
      workers: processes; this one does the work itself if there is one, or if tokens are bytes,
        which would take longer to send than to make.
    Raises:
      WrongInput: a document that the tokenizer would not give back.
      CannotDo: a process died.
    """
    if workers == 1 or described.kind == "bytes":
        tokenizer = tokenizers.open_tokenizer(folder, described)
        for group in groups:
            yield _tokenise(group, tokenizer)
        return
    # Not forked: other threads of this process may hold locks.
    context = multiprocessing.get_context("spawn")
    pool = concurrent.futures.ProcessPoolExecutor(
        workers, context, initializer=_begin, initargs=(folder, described)
    )
    pending: collections.deque[concurrent.futures.Future[list[Tokenised]]] = collections.deque()
    try:
        for group in groups:
            pending.append(pool.submit(_tokenise_here, group))
            if len(pending) > 2 * workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except concurrent.futures.process.BrokenProcessPool:
        raise CannotDo(
            f"workers={workers}: one of the processes that tokenise died, perhaps for want of "
            "memory; the same command goes on from what is done, with fewer workers if need be"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def _tokenise(group: list[Place], tokenizer: tokenizers.Tokenizer) -> list[Tokenised]:
    found = []
    for place in group:
        content = place.document.content
        try:
            tokens = tokenizer.encode(content)
        except ValueError as error:
            raise WrongInput(f"document {place.document.name}: {error}") from None
        found.append(
            Tokenised(
                place.unit,
                place.number,
                place.document.name,
                place.read,
                len(content),
                content_digest(content),
                _is_utf8(content),
                tokens,
            )
        )
    return found


def _is_utf8(content: bytes) -> bool:
    try:
        content.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


# --- in a process that tokenises ----------------------------------------------------------

_tokenizer: tokenizers.Tokenizer | None = None


def _begin(folder: pathlib.Path, described: manifest.Tokenizer) -> None:
    global _tokenizer
    # Ctrl-C is for the process that has the spool; it ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _tokenizer = tokenizers.open_tokenizer(folder, described)


def _end_with_parent() -> None:
    """A killed parent cannot end its children, and they hold both ends of the queue they read."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _tokenise_here(group: list[Place]) -> list[Tokenised]:
    assert _tokenizer is not None
    return _tokenise(group, _tokenizer)
