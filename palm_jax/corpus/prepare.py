"""Prepare a corpus: read, split, shuffle, join, cut, and write it as one finished folder.

Documents are tokenised into a spool (`spool.py`), which sorts them by a hash, and are then
packed in that order. The result depends on the documents, the settings and the seed alone:
not on the number of workers or machines, the order of the file system, or paths.
"""

# L sequence length, V vocabulary

from __future__ import annotations

import collections.abc
import os
import pathlib
import shutil
from typing import Any

import numpy as np
import numpy.typing as npt

from palm_jax.corpus import bigram, manifest, packing, spool, tokenising, tokenizers
from palm_jax.corpus.manifest import Manifest, Split
from palm_jax.corpus.spool import Journal, Recipe
from palm_jax.corpus.tokenising import Job, Progress, add_contents
from palm_jax.corpus.workplace import finish, workplace
from palm_jax.errors import CannotDo, WrongInput

SHARD_BYTES = 256 * 2**20

_SPOOL = "spool"  # within the workplace of a corpus


def prepare(
    *,
    out: str | os.PathLike[str],
    shard_bytes: int = SHARD_BYTES,
    progress: Progress | None = None,
    **settings: Any,
) -> Manifest:
    """Write the corpus folder `out` (`manifest.py` describes it) and return its manifest.

    Each split is one stream: an end of document, then document after document with an end
    each. Sequence i is stream[i L : i L + L + 1]; neighbours share a token, so that every
    token of every document, and every end, is a target exactly once. Nothing is padded; only
    the targets at the stream's end that do not fill a sequence are left out, and counted.

    Preparing the same corpus again changes nothing and returns its manifest. What a process
    that was killed or interrupted had tokenised is taken over by the next for the same `out`.

    Args:
      shard_bytes: tokens of a shard, at most (but one record at least).
      progress: told (stage, done, total), in bytes while "choosing a sample" and "reading", in
        sequences while "writing"; and once ("room", bytes needed on disk, bytes free).
      settings: as `Job` has them.
    Raises:
      WrongInput: a setting is out of range, the source has no or too few documents, or
        `out` holds something else.
      CannotDo: `out` cannot be written, or another process is preparing it.
    """
    folder = manifest.local_folder(out, "out")
    job = Job(**settings)
    _check_shard_bytes(shard_bytes)
    tell = progress or _silent
    try:
        existing = _existing(folder, job)
        with workplace(folder, _is_worth_keeping) as place:
            _clear(place, but=_SPOOL)
            journal = tokenising.fill(place / _SPOOL, job, tell)
            made = _pack([place / _SPOOL], [journal], place, shard_bytes, job.memory_bytes, tell)
            shutil.rmtree(place / _SPOOL)
            _finish_once(place, folder, existing, made)
    except OSError as error:
        raise CannotDo(f"cannot write the corpus out={folder}: {error}") from error
    return existing or made


def prepare_part(
    *, out: str | os.PathLike[str], progress: Progress | None = None, **settings: Any
) -> Journal:
    """Tokenise one shard of the source, `Job.shard` of `Job.shards`, into the folder `out`.

    `merge` makes the corpus of all parts; its bytes are those that `prepare` writes alone.
    Arguments and errors are as there, but a tokenizer cannot be trained on a part.
    """
    folder = manifest.local_folder(out, "out")
    job = Job(**settings)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        found = tokenising.found_again(folder, job)
        if found is None:
            raise WrongInput(
                f"out={folder} exists and is not this part of this corpus; name another folder "
                "or remove it"
            )
        return found
    try:
        with workplace(folder, _is_worth_keeping) as place:
            _clear(place, but=_SPOOL)
            journal = tokenising.fill(place / _SPOOL, job, progress or _silent)
            for path in (place / _SPOOL).iterdir():
                path.rename(place / path.name)
            (place / _SPOOL).rmdir()
            finish(place, folder)
    except OSError as error:
        raise CannotDo(f"cannot write the part out={folder}: {error}") from error
    return journal


def merge(
    *,
    parts: collections.abc.Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    shard_bytes: int = SHARD_BYTES,
    memory_bytes: int = spool.MEMORY_BYTES,
    progress: Progress | None = None,
) -> Manifest:
    """Write the corpus `out` of all parts that `prepare_part` made, which stay as they are.

    Raises:
      WrongInput: a part is missing, damaged, there twice, or of another corpus; or `out`
        holds something else.
      CannotDo: `out` cannot be written, or another process is preparing it.
    """
    folder = manifest.local_folder(out, "out")
    _check_shard_bytes(shard_bytes)
    folders = [manifest.local_folder(part, "part") for part in parts]
    journals = [spool.read_journal(part) for part in folders]
    _check_parts(folders, journals)
    try:
        existing = _existing(folder, journals[0].recipe)
        with workplace(folder, lambda place, error: False) as place:
            _clear(place)
            made = _pack(folders, journals, place, shard_bytes, memory_bytes, progress or _silent)
            _finish_once(place, folder, existing, made)
    except OSError as error:
        raise CannotDo(f"cannot write the corpus out={folder}: {error}") from error
    return existing or made


def _check_parts(folders: list[pathlib.Path], journals: list[Journal]) -> None:
    if not journals:
        raise WrongInput("there are no parts to merge; name the folders of all")
    first, number = journals[0], journals[0].shards
    for folder, journal in zip(folders, journals, strict=True):
        if not journal.is_complete:
            raise WrongInput(f"{folder} is not complete; run its `palm-jax data prepare` again")
        if (journal.shards, journal.units) != (number, first.units):
            raise WrongInput(
                f"{folder} is one of {journal.shards} parts of {journal.units} units, but "
                f"{folders[0]} one of {number} of {first.units}; name the parts of one corpus"
            )
        theirs, ours = journal.recipe.model_dump(), first.recipe.model_dump()
        if different := [key for key in ours if ours[key] != theirs[key]]:
            key = different[0]
            raise WrongInput(
                f"{folder} was made with {key}={theirs[key]!r}, but {folders[0]} with "
                f"{ours[key]!r}; name the parts of one corpus"
            )
    shards = [journal.shard for journal in journals]
    if twice := [shard for shard in set(shards) if shards.count(shard) > 1]:
        raise WrongInput(f"part {twice[0]}/{number} is there twice; name each once")
    if missing := sorted(set(range(number)) - set(shards)):
        raise WrongInput(
            f"part {', '.join(f'{shard}/{number}' for shard in missing[:10])} is missing; "
            "name the folders of all parts"
        )


def _silent(stage: str, done: int, total: int) -> None:
    pass


def _check_shard_bytes(shard_bytes: int) -> None:
    if isinstance(shard_bytes, bool) or shard_bytes < 1:
        raise WrongInput(f"shard_bytes={shard_bytes} must be 1 or more")


def _existing(folder: pathlib.Path, wanted: Job | Recipe) -> Manifest | None:
    """The manifest of a corpus already in `folder`, if it was made with these settings."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return None
    if not (folder / manifest.FILE_NAME).is_file():
        raise WrongInput(
            f"out={folder} exists and is not a corpus; name another folder or remove it"
        )
    found = manifest.read(folder)
    for setting in Recipe.model_fields:
        value = getattr(wanted, setting)
        if setting != "tokenizer" and getattr(found, setting) != value:
            raise WrongInput(
                f"out={folder} holds a corpus made with {setting}={getattr(found, setting)!r}, "
                f"not {value!r}; name another folder or remove that one"
            )
    return found


def _is_worth_keeping(place: pathlib.Path, error: BaseException) -> bool:
    """Whether the next process could go on: not from documents that make no corpus."""
    try:
        journal = spool.read_journal(place / _SPOOL)
    except WrongInput:
        return False
    return not (journal.is_complete and isinstance(error, WrongInput))


def _clear(place: pathlib.Path, but: str | None = None) -> None:
    for path in place.iterdir():
        if path.is_dir() and not path.is_symlink():
            if path.name != but:
                shutil.rmtree(path)
        else:
            path.unlink()


def _finish_once(
    place: pathlib.Path, folder: pathlib.Path, existing: Manifest | None, made: Manifest
) -> None:
    if existing is None:
        finish(place, folder)
    elif not existing.is_same_corpus(made):
        raise WrongInput(
            f"out={folder} holds a corpus made from other documents "
            f"({existing.digest[:16]}, this would be {made.digest[:16]}); "
            "name another folder or remove that one"
        )


def _pack(
    spools: list[pathlib.Path],
    journals: list[Journal],
    place: pathlib.Path,
    shard_bytes: int,
    memory_bytes: int,
    tell: Progress,
) -> Manifest:
    """Write every file of the corpus that the spools hold together into `place`."""
    recipe = journals[0].recipe
    described = recipe.tokenizer
    tokenizer = tokenizers.open_tokenizer(spools[0], described)
    tallies = {name: _added([j.tallies[name] for j in journals]) for name in manifest.SPLITS}
    empty = sum(journal.empty_documents for journal in journals)
    _check_enough(tallies, recipe, empty)
    total = sum(tally.tokens + tally.documents for tally in tallies.values())
    total //= recipe.sequence_length
    splits: dict[str, Split] = {}
    pairs: dict[str, npt.NDArray[np.int64]] = {}
    astray = 0
    for name in manifest.SPLITS:
        records = spool.in_order(spools, name, place, memory_bytes)
        if recipe.drop_duplicates:
            records = packing.without_copies(records)
        counted = _Astray(name, recipe.held_out)
        done = sum(split.sequences for split in splits.values())
        split, pairs[name] = packing.write_split(
            place,
            name,
            counted.through(records),
            tokenizer,
            np.dtype(described.dtype).newbyteorder("<"),
            recipe.sequence_length,
            shard_bytes,
            _counting_from(done, total, tell),
        )
        if split is None:
            raise _too_few(name, "no whole sequence once copies are dropped", recipe)
        splits[name] = split
        astray += counted.number
    if described.model is not None:
        shutil.copyfile(spools[0] / described.model.file, place / described.model.file)
    kept = sum(split.documents for split in splits.values())
    read = sum(tally.documents for tally in tallies.values())
    contents = 0
    for journal in journals:
        contents = add_contents(contents, int(journal.contents, 16))
    made = Manifest(
        digest=manifest.corpus_digest(described, recipe.sequence_length, splits),
        tokenizer=described,
        dtype=described.dtype,
        sequence_length=recipe.sequence_length,
        seed=recipe.seed,
        held_out=recipe.held_out,
        source=recipe.source,
        document_separator=recipe.document_separator,
        drop_duplicates=recipe.drop_duplicates,
        source_digest=f"{contents:064x}",
        documents_read=read + empty,
        empty_documents=empty,
        duplicates_dropped=read - kept,
        invalid_utf8_documents=sum(journal.invalid_utf8_documents for journal in journals),
        longest_document_bytes=max(journal.longest_document_bytes for journal in journals),
        documents_in_both_splits=astray,
        bigram_bits_per_byte=(
            bigram.bits_per_byte(pairs["train"], pairs["held_out"], splits["held_out"].target_bytes)
            if pairs["train"].size and splits["held_out"].target_bytes
            else None
        ),
        splits=splits,
    )
    manifest.write(place, made)
    return made


def _counting_from(done: int, total: int, tell: Progress) -> collections.abc.Callable[[int], None]:
    return lambda written: tell("writing", done + written, total)


class _Astray:
    """Counts documents of a split whose content belongs to the other."""

    def __init__(self, split: str, held_out: float) -> None:
        self.number = 0
        self._split, self._held_out = split, held_out

    def through(
        self, records: collections.abc.Iterable[spool.Record]
    ) -> collections.abc.Iterator[spool.Record]:
        for record in records:
            self.number += tokenising.split_of(record.digest, self._held_out) != self._split
            yield record


def _added(tallies: list[spool.Tally]) -> spool.Tally:
    return spool.Tally(
        documents=sum(tally.documents for tally in tallies),
        tokens=sum(tally.tokens for tally in tallies),
        bytes=sum(tally.bytes for tally in tallies),
    )


def _check_enough(tallies: dict[str, spool.Tally], recipe: Recipe, empty: int) -> None:
    """Each split has documents and a whole sequence.

    Raises:
      WrongInput: else.
    """
    documents = sum(tally.documents for tally in tallies.values())
    if documents == 0:
        raise WrongInput(
            f"source={', '.join(recipe.source)} has no document with any text "
            f"({empty} empty); give it some"
        )
    needed = recipe.sequence_length + 1
    # An end of document, then the documents with an end each.
    there = {name: 1 + t.tokens + t.documents for name, t in tallies.items() if t.documents}
    if sum(there.values()) < len(tallies) * needed:
        raise WrongInput(
            f"source={', '.join(recipe.source)} has {sum(there.values())} tokens, too few: one "
            f"sequence for each split needs {len(tallies)} x {needed} = {len(tallies) * needed} "
            f"(sequence_length={recipe.sequence_length} and one); give more text or make "
            "sequence_length smaller"
        )
    for name in tallies:
        if name not in there:
            raise _too_few(name, f"none of the {documents} documents", recipe)
        if there[name] < needed:
            raise _too_few(name, f"{there[name]} tokens", recipe)


def _too_few(split: str, what: str, recipe: Recipe) -> WrongInput:
    remedy = "raise held_out" if split == "held_out" else "lower held_out"
    more = "" if recipe.document_separator else " (document_separator makes more)"
    return WrongInput(
        f"the {split} split has {what} at held_out={recipe.held_out}, too few: a sequence needs "
        f"{recipe.sequence_length + 1} tokens (sequence_length={recipe.sequence_length} and "
        f"one); {remedy}, give more documents{more} or make sequence_length smaller"
    )
