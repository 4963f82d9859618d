"""Eight emulated CPU devices and a pinned thread pool, set before JAX looks at its devices."""

from __future__ import annotations

import copy
import os
import pathlib

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["NPROC"] = "8"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import numpy as np
import pytest

from palm_jax import config, start
from palm_jax.corpus import prepare

jax.config.update("jax_compilation_cache_dir", str(start.cache_folder() / "tests"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)

SMALL = {
    "steps": 12,
    "model": {
        "num_layers": 2,
        "width": 16,
        "num_heads": 2,
        "head_size": 8,
        "vocabulary_size": 257,
        "sequence_length": 8,
    },
    "data": {"corpus": "", "ramp": {"starts": [0, 5], "sizes": [8, 16]}},
    "checkpoint": {"every": 4},
    "log": {"every": 3, "tensorboard": False},
}


@pytest.fixture(scope="session")
def corpus_folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A byte corpus with sequences of 8, from made-up text."""
    folder = tmp_path_factory.mktemp("corpus")
    rng = np.random.default_rng(0)
    words = ["the", "a", "model", "step", "loss", "spike", "batch", "token", "and", "of", "again"]
    for number in range(60):
        text = " ".join(rng.choice(words, size=rng.integers(20, 60)))
        (folder / f"{number:03d}.txt").write_text(text)
    prepare.prepare(
        source=f"text:{folder}/*.txt", out=folder / "corpus", sequence_length=8, held_out=0.2
    )
    return folder / "corpus"


@pytest.fixture(scope="session")
def small(corpus_folder: pathlib.Path):
    """Builds the smallest config that has everything: small(width=..., **{"mesh.data": 8})."""

    def build(**overrides) -> config.Config:
        settings = copy.deepcopy(SMALL)
        settings["data"]["corpus"] = str(corpus_folder)
        for name, value in overrides.items():
            place = settings
            *sections, key = name.split(".")
            for section in sections:
                place = place.setdefault(section, {})
            place[key] = value
        return config.from_dict(settings)

    return build
