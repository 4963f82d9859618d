"""Where the tokenizer of a run lies: with its corpus, or in a run that was imported."""

from __future__ import annotations

import pathlib

from palm_jax import config
from palm_jax.corpus import manifest, tokenizers
from palm_jax.errors import WrongInput
from palm_jax.record.folder import RunFolder


def found_in(
    run: RunFolder, settings: config.Config, described: manifest.Tokenizer
) -> pathlib.Path:
    """The folder of the tokenizer's model; the run's own where it has none.

    Args:
      settings: the run's, perhaps with its corpus elsewhere.
    Raises:
      WrongInput: it is not there.
    """
    if described.model is None:
        return run.path
    for place in (run.path, *map(pathlib.Path, settings.data.places.values())):
        if (place / described.model.file).is_file():
            return place
    raise WrongInput(
        f"the tokenizer of {run.path}, {described.model.file}, lies with its corpus, and "
        f"{settings.data.told} is not there; say where it is with data.corpus=DIR"
    )


def opened(
    run: RunFolder, settings: config.Config, described: manifest.Tokenizer
) -> tokenizers.Tokenizer:
    """The tokenizer; errors as `found_in` and tokenizers.open_tokenizer."""
    return tokenizers.open_tokenizer(found_in(run, settings, described), described)
