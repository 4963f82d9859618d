"""Greedy continuations without a cache: each token is a forward pass over all that came before."""

# L sequence length

from __future__ import annotations

import collections.abc

import numpy as np
import numpy.typing as npt

from palm_jax import model
from palm_jax.use.scoring import Scorer

Tokens = npt.NDArray[np.integer]


def continuations(
    scorer: Scorer,
    params: model.Params,
    prompts: collections.abc.Sequence[Tokens],
    num_tokens: collections.abc.Sequence[int],
    is_done: collections.abc.Callable[[int, list[int]], bool] = lambda prompt, tokens: False,
) -> list[list[int]]:
    """The most likely token after each prompt, the most likely one after that, and so on.

    The model sees the last L tokens, prompt and continuation together.

    Args:
      prompts: none of them empty.
      num_tokens: how many at most, for each prompt.
      is_done: given the place of a prompt and its continuation up to now, whether to stop there.
    """
    length = scorer.program.settings.model.sequence_length
    found: list[list[int]] = [[] for _ in prompts]
    going = [place for place, most in enumerate(num_tokens) if most > 0]
    while going:
        seen = [np.append(prompts[place], found[place])[-length:] for place in going]
        rows = np.zeros((len(going), length + 1), np.int64)
        for row, tokens in zip(rows, seen, strict=True):
            row[: len(tokens)] = tokens  # what follows changes nothing before it

        for own, scores in scorer(params, len(rows), rows.__getitem__):
            for number, place in enumerate(own):
                token = int(scores.greedy_BL[number, len(seen[place]) - 1])
                found[going[place]].append(token)
        going = [
            place
            for place in going
            if len(found[place]) < num_tokens[place] and not is_done(place, found[place])
        ]
    return found
