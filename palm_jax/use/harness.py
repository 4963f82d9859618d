"""A run's model for EleutherAI's lm-eval, which the extra `eval` installs.

    lm_eval.simple_evaluate(PalmJax(scorer, params, tokenizer), tasks=["arc_easy"])

Texts begin with an end of document, as in training. Where a token would span the end of a context,
what is scored begins with that token (choices.py).
"""

from __future__ import annotations

import collections.abc
import pathlib
from typing import Any

import numpy as np

from palm_jax import model
from palm_jax.corpus.tokenizers import Tokenizer
from palm_jax.errors import CannotDo, WrongInput
from palm_jax.use import choices, greedy
from palm_jax.use.scoring import Scorer

try:
    import lm_eval
    import lm_eval.api.model
    import lm_eval.tasks
    import lm_eval.utils
except ModuleNotFoundError as error:
    raise CannotDo(
        f"tasks are those of lm-eval, which is not installed ({error}); install palm-jax[eval]"
    ) from error

MOST_TOKENS = 256  # of a generation, where a task does not say; as lm-eval's own models have it
# What a task may say of a generation. Sampling is refused.
_KNOWN = {"until", "max_gen_toks", "do_sample", "temperature"}


class PalmJax(lm_eval.api.model.LM):
    """lm-eval's three questions to a model."""

    def __init__(self, scorer: Scorer, params: model.Params, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._scorer, self._params, self._tokenizer = scorer, params, tokenizer
        self._length = scorer.program.settings.model.sequence_length

    def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
        """(nats, whether it is the greedy continuation) of each (context, continuation).

        A context that is too long loses its beginning.

        Raises:
          WrongInput: a continuation is longer than the model's sequences.
        """
        given = []
        for context, continuation in (request.args for request in requests):
            ((passage,), _) = choices.passages(context, [continuation], self._tokenizer)
            given.append(passage)
        return [(one.nats, one.is_greedy) for one in self._likelihoods(given)]

    def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
        """Nats of each whole text, every token once, in windows of the model's length.

        The last window is a whole one, too: it repeats tokens as context, and scores the rest.
        """
        end, given, owners = self._tokenizer.end_of_document, [], []
        for number, (text,) in enumerate(request.args for request in requests):
            tokens = self._tokenizer.encode(text.encode("utf-8", "surrogatepass")).tolist()
            windows = lm_eval.utils.get_rolling_token_windows(tokens, end, self._length, 1)
            for inputs, targets in windows:
                context = inputs[: len(inputs) - (len(targets) - 1)]
                given.append(choices.Passage(np.array(context + targets), len(targets)))
                owners.append(number)
        nats = [0.0] * len(requests)
        for number, one in zip(owners, self._likelihoods(given), strict=True):
            nats[number] += one.nats
        return nats

    def generate_until(self, requests: list[Any]) -> list[str]:
        """The greedy continuation of each context, up to the first of some texts.

        Without a cache: every token is a forward pass over all before it, for all requests at once.
        Beyond the model's length it sees the last tokens, as many as that.

        Raises:
          WrongInput: a request wants sampling, or something that is not known here.
        """
        end = self._tokenizer.end_of_document
        prompts, most, stops = [], [], []
        for context, given in (request.args for request in requests):
            if strange := sorted(set(given) - _KNOWN):
                raise WrongInput(f"generation_kwargs.{strange[0]} is not known here; leave it out")
            if given.get("do_sample") or given.get("temperature"):
                raise WrongInput(
                    "generation is greedy here; set generation_kwargs.do_sample=false and "
                    "temperature=0"
                )
            tokens = self._tokenizer.encode(context.encode("utf-8", "surrogatepass"))
            prompts.append(np.concatenate([[end], tokens.astype(np.int64)]))
            most.append(int(given.get("max_gen_toks", MOST_TOKENS)))
            until = given.get("until") or []
            until = [until] if isinstance(until, str) else until
            stops.append([text.encode() for text in until if text])

        def is_done(place: int, tokens: list[int]) -> bool:
            text = self._text(tokens)
            return tokens[-1] == end or any(stop in text for stop in stops[place])

        found = greedy.continuations(self._scorer, self._params, prompts, most, is_done)
        texts = [self._text(tokens) for tokens in found]
        cut = [_before(text, until) for text, until in zip(texts, stops, strict=True)]
        return [text.decode("utf-8", errors="replace") for text in cut]

    def _text(self, tokens: list[int]) -> bytes:
        """Without tokens that stand for no text, such as the end of a document."""
        with_text = [token for token in tokens if self._tokenizer.num_bytes(np.array([token]))]
        return self._tokenizer.decode(np.array(with_text, np.int64))

    def _likelihoods(self, given: list[choices.Passage]) -> list[choices.Likelihood]:
        end = self._tokenizer.end_of_document
        return choices.likelihoods(self._scorer, self._params, given, end)


def _before(text: bytes, stops: list[bytes]) -> bytes:
    places = [text.find(stop) for stop in stops]
    return text[: min([place for place in places if place >= 0], default=len(text))]


def results(
    lm: PalmJax,
    tasks: collections.abc.Sequence[str],
    folder: pathlib.Path | None = None,
    limit: int | None = None,
) -> dict[str, Any]:
    """What lm-eval says of a model on tasks, by task; its own names for numbers.

    Args:
      folder: with tasks of one's own, in YAML files; if all are there, lm-eval's own are not read.
      limit: how many of a task's documents; None: all.
    Raises:
      WrongInput: there is no such task.
    """
    manager = None
    if folder is not None:
        own = lm_eval.tasks.TaskManager(include_path=str(folder), include_defaults=False)
        manager = own if set(tasks) <= set(own.all_tasks) else None
    if manager is None:  # goes through thousands of files
        manager = lm_eval.tasks.TaskManager(include_path=None if folder is None else str(folder))
    if unknown := [name for name in tasks if name not in manager.all_tasks]:
        raise WrongInput(f"--tasks {unknown[0]}: lm-eval has no such task; see `lm-eval ls tasks`")
    # All of its seeds are its defaults: equal requests each time.
    found = lm_eval.simple_evaluate(
        lm, tasks=list(tasks), task_manager=manager, limit=limit, log_samples=False
    )
    assert found is not None, "only other processes get nothing"
    return {"results": found["results"], "samples": found["n-samples"]}
