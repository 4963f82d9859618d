"""Eight emulated CPU devices and a pinned thread pool, set before JAX looks at its devices.

Each program is compiled once in a session. JAX's folder of compiled programs would not do: what
several CPU devices read from it may wait forever (palm_jax/start.py). A compiled program takes
about a thousand memory mappings, of which Linux gives a process 65,530; XLA crashes at the end
of them, so all programs are dropped half-way there.
"""

from __future__ import annotations

import collections.abc
import copy
import dataclasses
import functools
import gc
import os
import pathlib

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["NPROC"] = "8"
os.environ["OPENBLAS_NUM_THREADS"] = "1"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import numpy as np
import pytest

from palm_jax import config, step
from palm_jax.corpus import prepare

AFRESH = step.make_program
# Settings that say when and where, and nothing of what a step computes.
NOT_COMPILED = {
    **dict.fromkeys(["steps", "data", "checkpoint", "spikes", "eval"], True),
    **dict.fromkeys(["verify", "distributed", "supervise"], True),
    "log": set(config.Log.model_fields) - {"vitals", "microbatch_digests"},
}
PROGRAMS: dict[tuple[str, jax.sharding.Mesh, int], step.Program] = {}


@functools.wraps(AFRESH)
def make_program(
    settings: config.Config, mesh: jax.sharding.Mesh, end_of_document: int
) -> step.Program:
    key = settings.model_dump_json(exclude=NOT_COMPILED), mesh, end_of_document
    if key not in PROGRAMS:
        PROGRAMS[key] = AFRESH(settings, mesh, end_of_document)
    return dataclasses.replace(PROGRAMS[key], settings=settings)


# Before palm_jax.course and others take it by its name.
step.make_program = make_program

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
    # Basic vitals: a fifth less to compile. What `all` changes is for test_vitals.py to show.
    "log": {"every": 3, "tensorboard": False, "vitals": "basic"},
}


MAPPINGS = pathlib.Path("/proc/self/maps")
MOST_MAPPINGS = 30_000


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # The longest of all first: two processes share the files, and neither should wait for it.
    items.sort(key=lambda item: "/tpu/" not in item.path.as_posix())


@pytest.fixture(autouse=True)
def few_mappings() -> collections.abc.Iterator[None]:
    yield
    if MAPPINGS.exists() and len(MAPPINGS.read_bytes().splitlines()) > MOST_MAPPINGS:
        PROGRAMS.clear()
        jax.clear_caches()
        gc.collect()


@pytest.fixture
def compiled_afresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a test that changes the code of a step."""
    monkeypatch.setitem(globals(), "PROGRAMS", {})


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
