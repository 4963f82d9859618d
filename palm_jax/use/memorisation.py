"""How much of its training data a model can recite (PaLM, section 7).

From a passage of a sequence that was trained on, the model is given the first tokens and continues
greedily; the passage counts as memorised if the rest comes out token by token. How often the
passage occurs in the training split is counted in all of it. Passages of a split that is not
trained on show how much can be guessed.
"""

# L sequence length

from __future__ import annotations

import bisect
import collections.abc
import dataclasses
import functools

import numpy as np
import numpy.typing as npt

from palm_jax import data, model, stream
from palm_jax.corpus.corpora import Corpora
from palm_jax.corpus.reader import Corpus
from palm_jax.errors import WrongInput
from palm_jax.record import segments
from palm_jax.record.folder import RunFolder
from palm_jax.use import greedy
from palm_jax.use.scoring import Scorer
from palm_jax.use.trained import TrainedRun

PROMPT, CONTINUATION = 50, 50  # tokens, as in the paper
# Sequences that are looked at for each passage that is wanted, before giving up.
_PATIENCE = 100
_AT_ONCE = 4096  # sequences that are read together for counting
# Odd, so that it has an inverse modulo 2^64; any such number would do.
_BASE = np.uint64(0x9E3779B97F4A7C15)


@dataclasses.dataclass(frozen=True)
class Passage:
    sequence: int  # its id
    start: int  # column of the first token
    tokens: tuple[int, ...]  # prompt and continuation; all of one document


@dataclasses.dataclass(frozen=True)
class Recital:
    passage: Passage
    right: int  # tokens of the continuation before the first wrong one
    occurrences: int | None  # of the whole passage in the split; None: not counted


def trained_on(found: TrainedRun, step: int) -> tuple[int, collections.abc.Callable[[int], int]]:
    """How many sequences the state before `step` was trained on, and the id of each of them.

    Sequences count as often as they were trained on, in the order in which they were; the ids come
    from the segments that led to the state.
    """
    base, corpus = found.course.base, found.corpus
    assert corpus is not None
    before = functools.partial(stream.sequences_before, base.data.ramp)
    parts: list[tuple[int, int, range, segments.Segment]] = []
    total = 0
    for segment, start, stop in reversed(_lineage(found.run, found.course.segment, step)):
        steps = range(segment.data_step(start), segment.data_step(stop))
        first = before(steps.start)
        count = before(steps.stop) - first
        parts.append((total + count, first - total, steps, segment))
        total += count
    ranges = data.id_ranges(corpus, "train", base.data.mixture)

    def sequence_id(number: int) -> int:
        _, shift, steps, segment = next(part for part in parts if number < part[0])
        index = number + shift
        data_step = steps[bisect.bisect_right(steps, index, key=before) - 1]
        place = segment.stream_of(base).places(data_step)[index - before(data_step)]
        return int(data.ids_at(base.seed, [place], ranges)[0])

    return total, sequence_id


def _lineage(
    run: RunFolder, segment: segments.Segment, step: int
) -> list[tuple[segments.Segment, int, int]]:
    """(segment, first step, step after the last) of what led to the state, backwards."""
    parts = []
    while True:
        if step > segment.start_step:
            parts.append((segment, segment.start_step, step))
        parent = segment.parent
        if parent is None:
            return parts
        if parent.run is not None:
            run = RunFolder((run.path / parent.run).resolve())
        step = min(step, parent.step)
        segment = segments.read(run.segment(parent.segment))


def draw(
    corpus: Corpus | Corpora,
    split: str,
    num_sequences: int,
    sequence_id: collections.abc.Callable[[int], int],
    num: int,
    length: int,
    seed: int = 0,
) -> list[Passage]:
    """Passages of different sequences, each within one document; a function of the seed.

    Args:
      num_sequences: to draw from; `sequence_id` says which these are.
      length: of a passage, in tokens.
    Raises:
      WrongInput: sequences are too short, or too few hold so long a stretch of one document.
    """
    if length > corpus.sequence_length:
        raise WrongInput(
            f"{length} tokens of prompt and continuation do not fit into sequences of "
            f"{corpus.sequence_length}; ask for fewer"
        )
    rng = np.random.default_rng(seed)
    end = corpus.manifest.end_of_document
    passages: list[Passage] = []
    seen: set[int] = set()
    for _ in range(_PATIENCE * num):
        if len(passages) == num or len(seen) == num_sequences:
            break
        sequence = sequence_id(int(rng.integers(num_sequences)))
        start = int(rng.integers(corpus.sequence_length + 2 - length))
        if sequence in seen:
            continue
        seen.add(sequence)
        (row,) = corpus.read(split, [sequence])
        tokens = row[start : start + length]
        if end not in tokens:
            passages.append(Passage(sequence, start, tuple(tokens.tolist())))
    if not passages:
        raise WrongInput(
            f"none of {len(seen):,} sequences of split {split} holds {length} tokens of one "
            "document where it was looked at; ask for fewer tokens"
        )
    return passages


def recite(
    scorer: Scorer,
    params: model.Params,
    passages: collections.abc.Sequence[Passage],
    prompt: int,
    occurrences: collections.abc.Sequence[int] | None = None,
) -> list[Recital]:
    """What the model makes of the first `prompt` tokens of each passage."""

    def is_wrong(place: int, tokens: list[int]) -> bool:
        return tokens[-1] != passages[place].tokens[prompt + len(tokens) - 1]

    found = greedy.continuations(
        scorer,
        params,
        [np.array(passage.tokens[:prompt]) for passage in passages],
        [len(passage.tokens) - prompt for passage in passages],
        is_wrong,
    )
    return [
        Recital(
            passage,
            right=len(tokens) - is_wrong(place, tokens),
            occurrences=None if occurrences is None else occurrences[place],
        )
        for place, (passage, tokens) in enumerate(zip(passages, found, strict=True))
    ]


def is_memorised(recital: Recital, prompt: int) -> bool:
    return prompt + recital.right == len(recital.passage.tokens)


def by_occurrences(
    recitals: collections.abc.Sequence[Recital], prompt: int
) -> list[tuple[range, int, int]]:
    """(occurrences, passages, memorised ones) for 1, 2 to 3, 4 to 7, ... occurrences."""
    found: list[tuple[range, int, int]] = []
    counted = [one for one in recitals if one.occurrences is not None]
    most = max((one.occurrences or 0 for one in counted), default=0)
    start = 0
    while start <= most:
        own = range(start, max(1, 2 * start))
        these = [one for one in counted if one.occurrences in own]
        if these:
            memorised = sum(is_memorised(one, prompt) for one in these)
            found.append((own, len(these), memorised))
        start = own.stop
    return found


def count_occurrences(
    corpus: Corpus | Corpora, passages: collections.abc.Sequence[Passage], split: str = "train"
) -> list[int]:
    """How often each passage's tokens stand in a split, wherever the cuts are.

    Reads all of the split once. Candidates are found by a hash of every stretch of that length, and
    compared token by token.
    """
    length = len(passages[0].tokens)
    wanted: dict[int, list[int]] = {}
    for place, passage in enumerate(passages):
        (value,) = _hashes(np.array(passage.tokens), length)
        wanted.setdefault(int(value), []).append(place)
    values = np.array(sorted(wanted), np.uint64)
    counts = [0] * len(passages)
    for stretch in _stretches(corpus, split, length):
        hashes = _hashes(stretch, length)
        for start in np.flatnonzero(np.isin(hashes, values)).tolist():
            tokens = tuple(stretch[start : start + length].tolist())
            for place in wanted[int(hashes[start])]:
                counts[place] += tokens == passages[place].tokens
    return counts


def _hashes(tokens: npt.NDArray[np.integer], length: int) -> npt.NDArray[np.uint64]:
    """A hash of every stretch of `length` tokens: sum of (token + 1) b^place, modulo 2^64."""
    words = tokens.astype(np.uint64) + np.uint64(1)
    found = np.zeros(max(0, len(words) - length + 1), np.uint64)
    for place in range(length):  # Horner, all stretches at once; unsigned products wrap around
        found = found * _BASE + words[place : place + len(found)]
    return found


def _stretches(
    corpus: Corpus | Corpora, split: str, length: int
) -> collections.abc.Iterator[npt.NDArray[np.integer]]:
    """A split's tokens, so that each place where `length` tokens begin is in one of them."""
    for one in [corpus] if isinstance(corpus, Corpus) else corpus.corpora.values():
        behind = np.empty(0, np.int32)
        num_sequences = one.num_sequences(split)
        for first in range(0, num_sequences, _AT_ONCE):
            rows = one.read(split, np.arange(first, min(first + _AT_ONCE, num_sequences)))
            # A sequence's last token is the first of the one behind it.
            new = rows[:, :-1].reshape(-1)
            if first + len(rows) == num_sequences:
                new = np.append(new, rows[-1, -1])
            stretch = np.concatenate([behind, new])
            yield stretch
            behind = stretch[max(0, len(stretch) - length + 1) :]
