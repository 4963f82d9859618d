"""Prompts to text: passes of rows through the decoder, and what is told on the way."""

from __future__ import annotations

import collections.abc
import dataclasses
import time
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from palm_jax.corpus.tokenizers import Tokenizer
from palm_jax.errors import CannotDo, WrongInput
from palm_jax.use import sample, texts
from palm_jax.use.decode import Decoder, Weights

MOST_TOKENS = 128  # where nobody says how many; fewer where the context ends before
AT_ONCE = 8  # tokens between two looks at what there is, where somebody looks

Ended = Literal["end_of_document", "max_tokens", "context"]
# (number of the row, its next tokens, whether they are its last)
Tell = collections.abc.Callable[[int, list[int], bool], None]


@dataclasses.dataclass(frozen=True)
class Row:
    """What was generated after one prompt."""

    text: str  # bytes that are no UTF-8 as U+FFFD; the tokens have them all
    tokens: list[int]  # an end of document among them, if that ended it
    logprobs: list[float]  # of each token under the model itself, at temperature 1, in nats
    ended: Ended
    prompt_tokens: int  # with the end of document before the prompt


@dataclasses.dataclass(frozen=True)
class Generation:
    rows: list[Row]
    tokens_per_second: float  # of all rows together; compiling and reading prompts not counted
    prompt_seconds: float  # in which prompts were read
    cache_bytes: int  # of keys and values, of the rows that are computed at once


def prompt_tokens(
    tokenizer: Tokenizer, prompt: bytes, context: int, max_tokens: int | None, name: str
) -> np.ndarray:
    """A prompt as the beginning of a document: after the end of the one before, as in training.

    Args:
      context: the longest text that the model reads, in tokens.
      max_tokens: that will be asked for.
      name: of the prompt, in messages.
    Raises:
      WrongInput: it leaves no room for that many tokens.
    """
    tokens = np.concatenate([[tokenizer.end_of_document], tokenizer.encode(prompt)])
    if len(tokens) > context:
        raise WrongInput(
            f"{name} has {len(tokens)} tokens, the end-of-document token before it included, and "
            f"the model reads model.sequence_length={context}; shorten it"
        )
    # The last token is said, and not read.
    if max_tokens is not None and len(tokens) + max_tokens > context + 1:
        raise WrongInput(
            f"--max-tokens {max_tokens} after the {len(tokens)} tokens of {name}, the "
            f"end-of-document token before it included, goes beyond the model's context "
            f"(model.sequence_length={context}); ask for {context + 1 - len(tokens)} at most"
        )
    return tokens.astype(np.int32)


def generate(
    decoder: Decoder,
    weights: Weights,
    tokenizer: Tokenizer,
    prompts: collections.abc.Sequence[np.ndarray],
    sampling: sample.Sampling,
    max_tokens: int | None = None,
    tell: Tell | None = None,
) -> Generation:
    """Continue each prompt until its document ends, or its tokens or the context are used up.

    Args:
      prompts: as from `prompt_tokens`.
      max_tokens: None: up to MOST_TOKENS, as far as the context has room.
      tell: is told of tokens as they are made.
    Raises:
      WrongInput: a number of `sampling` says nothing.
      CannotDo: the model's scores are not finite.
    """
    sample.check(sampling)
    wanted = MOST_TOKENS if max_tokens is None else max_tokens
    most = [min(wanted, decoder.context + 1 - len(prompt)) for prompt in prompts]
    how = {"is_greedy": sampling.is_greedy, "is_filtered": sampling.is_filtered}
    draw = sample.draw_of(sampling, decoder.settings.model.vocabulary_size)
    # With nothing to do, which compiles both.
    idle = decoder.read(weights, decoder.rows([], []))
    jax.block_until_ready(decoder.advance(weights, idle, draw, jnp.int32(0), **how))

    rows: list[Row] = []
    reading = decoding = 0.0
    for first in range(0, len(prompts), decoder.num_rows):
        here = slice(first, first + decoder.num_rows)
        began = time.perf_counter()
        text = decoder.read(weights, decoder.rows(prompts[here], most[here], first))
        jax.block_until_ready(text)
        reading += time.perf_counter() - began
        begins = [len(prompt) for prompt in prompts[here]]
        told = list(begins)
        at_once = jnp.int32(decoder.num_slots if tell is None else AT_ONCE)
        while True:
            began = time.perf_counter()
            text = decoder.advance(weights, text, draw, at_once, **how)
            has_ended = np.asarray(text.ended_R)
            decoding += time.perf_counter() - began
            if tell is not None:
                tokens_RS, lengths_R = np.asarray(text.tokens_RS), np.asarray(text.lengths_R)
                for place, start in enumerate(told):
                    new, is_last = tokens_RS[place, start : lengths_R[place]], has_ended[place]
                    if new.size:
                        tell(first + place, new.tolist(), bool(is_last))
                told = lengths_R[: len(told)].tolist()
            if has_ended.all():
                break
        arrays = text.tokens_RS, text.logprobs_RS, text.lengths_R, text.limits_R
        tokens_RS, logprobs_RS, lengths_R, limits_R = map(np.asarray, arrays)
        for place, start in enumerate(begins):
            stop = int(lengths_R[place])
            row = _row(
                tokens_RS[place, start:stop].tolist(),
                logprobs_RS[place, start:stop].tolist(),
                tokenizer,
                start,
                "max_tokens" if int(limits_R[place]) - start == wanted else "context",
            )
            if not np.isfinite(row.logprobs).all():
                raise CannotDo(
                    "the model's scores are not finite numbers, so that no token follows from "
                    "them; choose a step before its loss diverged with --step"
                )
            rows.append(row)
    num_tokens = sum(len(row.tokens) for row in rows)
    return Generation(rows, num_tokens / decoding, reading, decoder.cache_bytes)


def _row(
    tokens: list[int], logprobs: list[float], tokenizer: Tokenizer, begin: int, at_limit: Ended
) -> Row:
    is_whole = tokens[-1] == tokenizer.end_of_document
    return Row(
        text=texts.content(tokenizer, tokens).decode("utf-8", errors="replace"),
        tokens=tokens,
        logprobs=logprobs,
        ended="end_of_document" if is_whole else at_limit,
        prompt_tokens=begin,
    )
