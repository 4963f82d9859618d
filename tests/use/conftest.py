"""A small run that the tests of its uses share, and what scores texts with its model."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from palm_jax import train
from palm_jax.record.folder import RunFolder
from palm_jax.use import scoring, trained

END = 256


@pytest.fixture(scope="session")
def run(small, tmp_path_factory):
    """8 steps, checkpoints at 4 and 8, evaluated at 2, 4, 6 and 8."""
    settings = small(
        **{
            "data.ramp": {"starts": [0], "sizes": [8]},
            "steps": 8,
            "checkpoint.every": 4,
            "eval": {"every": 2},
        }
    )
    path = tmp_path_factory.mktemp("eval") / "run"
    train.train(settings, path)
    return path


@pytest.fixture(scope="session", autouse=True)
def each_scorer_is_compiled_once():
    made, afresh = {}, scoring.make_scorer

    def make_scorer(program, end_of_document):
        key = id(program.losses)  # conftest.py keeps each program's
        if key not in made:
            made[key] = program.losses, afresh(program, end_of_document)
        return dataclasses.replace(made[key][1], program=program)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scoring, "make_scorer", make_scorer)
        yield


@pytest.fixture(scope="session")
def found(run):
    there = RunFolder(run)
    with trained.opened(there, there.config()) as found:
        yield found


@pytest.fixture(scope="session")
def moment(found):
    return found.at(8)


@pytest.fixture(scope="session")
def scorer(moment):
    return scoring.make_scorer(moment.program, END)


@pytest.fixture(scope="session")
def params(moment):
    return jax.tree.map(lambda x: np.asarray(x, np.float64), moment.params)
