"""Multiple choice by likelihood: which of some continuations a model finds most likely.

What is scored is log P(choice | context) in the tokens of the whole text, context and choice
together: those that the model saw in training. A token may span the end of the context. So all
choices of an item are scored from one place on, where the tokens of all of them still agree and
lie within the context: what the place has before it is the same for all, and what comes after it
is scored whole. With byte tokens that is the end of the context itself. The text begins with an
end of document, as documents in training do.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import math
import pathlib
from typing import Annotated, NamedTuple

import numpy as np
import numpy.typing as npt
import pydantic

from palm_jax import files, model
from palm_jax.corpus.tokenizers import Tokenizer
from palm_jax.errors import WrongInput
from palm_jax.use.scoring import Scorer


class Item(pydantic.BaseModel):
    """A line of a file of choices."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", strict=True)

    context: str
    choices: Annotated[list[str], pydantic.Field(min_length=2)]
    answer: Annotated[int, pydantic.Field(ge=0)]

    @pydantic.model_validator(mode="after")
    def _can_be_answered(self) -> Item:
        if self.answer >= len(self.choices):
            raise ValueError(f"answer={self.answer}, but choices has {len(self.choices)}")
        if "" in self.choices:
            raise ValueError("an empty choice cannot be scored")
        return self


class Passage(NamedTuple):
    """A text of which the end is scored."""

    tokens: npt.NDArray[np.integer]  # context and what is scored
    scored: int  # how many tokens at the end


class Likelihood(NamedTuple):
    nats: float  # log-likelihood of what was scored
    is_greedy: bool  # each scored token was the most likely one


@dataclasses.dataclass(frozen=True)
class Answered:
    """An item, and what the model makes of it."""

    log_likelihoods: tuple[float, ...]  # nats, one a choice
    answer: int
    chosen: int  # the most likely; the first of several
    chosen_per_byte: int  # the most likely by nats over the choice's own bytes
    spans: bool  # a token spanned the end of the context
    truncated: bool  # of a choice, the beginning of the context was cut off


def read(path: pathlib.Path) -> list[Item]:
    """The items of a file of JSON lines.

    Raises:
      WrongInput: it cannot be read, is empty, or a line is no item.
    """
    try:
        lines = files.text(path).splitlines()
    except (OSError, ValueError) as error:
        raise WrongInput(f"--choices {path} cannot be read: {error}") from None
    items = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            items.append(Item.model_validate(files.parsed(line)))
        except pydantic.ValidationError as error:
            told = files.first_problem(error)
            raise WrongInput(f"--choices {path}, line {number}: {told}") from None
        except ValueError as error:
            raise WrongInput(f"--choices {path}, line {number}: {error}") from None
    if not items:
        raise WrongInput(f"--choices {path} has no lines; give one item a line")
    return items


def common_prefix(rows: collections.abc.Sequence[npt.NDArray[np.integer]]) -> int:
    """How many tokens at their beginning all rows share."""
    shortest = min(map(len, rows))
    alike = np.all([row[:shortest] == rows[0][:shortest] for row in rows], axis=0)
    return shortest if alike.all() else int(np.argmin(alike))


def passages(
    context: str, choices: collections.abc.Sequence[str], tokenizer: Tokenizer
) -> tuple[list[Passage], bool]:
    """Each choice after the context, and whether a token spans the end of the context."""

    def encoded(text: str) -> npt.NDArray[np.integer]:
        tokens = tokenizer.encode(text.encode("utf-8", "surrogatepass"))
        return np.concatenate([[tokenizer.end_of_document], tokens.astype(np.int64)])

    alone = encoded(context)
    whole = [encoded(context + choice) for choice in choices]
    place = common_prefix([alone, *whole])
    return [Passage(tokens, len(tokens) - place) for tokens in whole], place < len(alone)


def likelihoods(
    scorer: Scorer,
    params: model.Params,
    given: collections.abc.Sequence[Passage],
    end_of_document: int,
) -> list[Likelihood]:
    """Of each passage's end. The context of one that is too long loses its beginning.

    Raises:
      WrongInput: what is to be scored is itself longer than the model's sequences.
    """
    length = scorer.program.settings.model.sequence_length
    for passage in given:
        assert 0 <= passage.scored < len(passage.tokens)
        if passage.scored > length:
            raise WrongInput(
                f"{passage.scored} tokens are to be scored at once, and the model's sequences have "
                f"{length} (model.sequence_length); shorten them"
            )
    rows = np.full((len(given), length + 1), end_of_document, np.int64)
    kept = [passage.tokens[-(length + 1) :] for passage in given]
    for row, tokens in zip(rows, kept, strict=True):
        row[: len(tokens)] = tokens  # what follows changes nothing before it
    found = []
    for own, scores in scorer(params, len(given), lambda ids: rows[ids]):
        for number, sequence in enumerate(own):
            stop = len(kept[sequence]) - 1
            ends = slice(stop - given[sequence].scored, stop)
            nats = scores.nats_BL[number, ends].astype(np.float64)
            greedy = scores.greedy_BL[number, ends] == scores.targets_BL[number, ends]
            found.append(Likelihood(-math.fsum(nats.tolist()), bool(greedy.all())))
    return found


def answer(
    scorer: Scorer,
    params: model.Params,
    items: collections.abc.Sequence[Item],
    tokenizer: Tokenizer,
) -> list[Answered]:
    """Choose for each item; errors as in `likelihoods`."""
    length = scorer.program.settings.model.sequence_length
    given = [passages(item.context, item.choices, tokenizer) for item in items]
    flat = [passage for of_item, _ in given for passage in of_item]
    scored = iter(likelihoods(scorer, params, flat, tokenizer.end_of_document))
    found = []
    for item, (of_item, spans) in zip(items, given, strict=True):
        nats = [next(scored).nats for _ in of_item]
        sizes = [len(choice.encode("utf-8", "surrogatepass")) for choice in item.choices]
        per_byte = [n / size for n, size in zip(nats, sizes, strict=True)]
        found.append(
            Answered(
                log_likelihoods=tuple(nats),
                answer=item.answer,
                chosen=int(np.argmax(nats)),
                chosen_per_byte=int(np.argmax(per_byte)),
                spans=spans,
                truncated=any(len(passage.tokens) > length + 1 for passage in of_item),
            )
        )
    return found


def share(answered: collections.abc.Sequence[Answered], chosen: str) -> float:
    """Accuracy: for how many items `chosen`, or `chosen_per_byte`, is the answer."""
    return sum(getattr(one, chosen) == one.answer for one in answered) / len(answered)
