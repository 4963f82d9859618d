"""Digests of each microbatch's own gradient: the same on any devices, and they name the culprit."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from palm_jax import config, data, sharding, step, train
from palm_jax.corpus.reader import Corpus
from palm_jax.record import logbook
from palm_jax.record.folder import RunFolder
from palm_jax.replay import replay as replaying

END = 256


def one_step(settings, tokens):
    program = step.make_program(settings, sharding.make_mesh(settings.mesh), END)
    state, vitals = program.step(program.init(), program.put(tokens), step.controls())
    return jax.device_get(state), jax.device_get(vitals)


def batch(settings, num_sequences=16):
    shape = (num_sequences, settings.model.sequence_length + 1)
    return np.random.default_rng(3).integers(0, 257, shape).astype(np.int32)


def with_digests(small, **overrides):
    return small(**{"log.microbatch_digests": True}, **overrides)


@pytest.fixture(scope="module")
def on_one(small):
    return one_step(with_digests(small), batch(small()))


def test_each_changed_microbatch_changes_its_own_digest_only(small, on_one):
    digests = on_one[1]["microbatch_digests"]
    assert digests.shape == (16, 2)
    assert len({tuple(words) for words in digests.tolist()}) == 16
    tokens = batch(small())
    tokens[5, 3] = (tokens[5, 3] + 1) % 257
    tokens[12, 0] = (tokens[12, 0] + 1) % 257
    changed = one_step(with_digests(small), tokens)[1]["microbatch_digests"]
    assert np.flatnonzero((changed != digests).any(axis=1)).tolist() == [5, 12]


@pytest.mark.parametrize(
    "mesh", [(1, 2), *(pytest.param(m, marks=pytest.mark.slow) for m in [(8, 1), (2, 4)])]
)
def test_digests_are_the_same_on_any_mesh(small, on_one, mesh):
    settings = with_digests(small, **{"mesh.data": mesh[0], "mesh.fsdp": mesh[1]})
    found = one_step(settings, batch(settings))[1]["microbatch_digests"]
    assert found.tolist() == on_one[1]["microbatch_digests"].tolist()


def test_digests_change_no_other_bit(small, on_one):
    state, vitals = one_step(small(), batch(small()))
    with_them = dict(on_one[1])
    del with_them["microbatch_digests"]
    assert list(with_them) == list(vitals)
    for one, other in zip(
        jax.tree.leaves((state, vitals)), jax.tree.leaves((on_one[0], with_them)), strict=True
    ):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


@pytest.mark.slow
def test_tensor_parallel_devices_digest_their_parts_together(small):
    settings = with_digests(small, **{"mesh.tensor": 2})
    on_two = one_step(settings, batch(settings))[1]["microbatch_digests"]
    settings = with_digests(small, **{"mesh.tensor": 2, "mesh.data": 2, "mesh.fsdp": 2})
    on_eight = one_step(settings, batch(settings))[1]["microbatch_digests"]
    assert on_two.tolist() == on_eight.tolist()


def test_replay_names_microbatch_lane_device_and_process(small, tmp_path, monkeypatch):
    """Steps on two devices, of which one reads another token than the run did."""
    settings = with_digests(small, steps=2, **{"mesh.data": 2, "data.ramp": {"sizes": [16]}})
    train.train(settings, tmp_path / "run")
    whole = data.BatchSource.__getitem__

    def corrupted(self, index):
        found = whole(self, index)
        tokens = found.tokens.copy()
        tokens[13, 2] = (tokens[13, 2] + 1) % 257
        return dataclasses.replace(found, tokens=tokens)

    run = RunFolder(tmp_path / "run")
    with Corpus.open(run.config().data.corpus) as corpus:
        assert replaying.replay(run, 0, 2, corpus=corpus).identical
        monkeypatch.setattr(data.BatchSource, "__getitem__", corrupted)
        found = replaying.replay(run, 0, 2, corpus=corpus)
    assert found.first_difference.step == 0
    # Thirteenth of the batch, the fifth of its block of eight; odd ones are the second device's.
    assert found.first_difference.microbatches == (replaying.Microbatch(13, 5, 1, 0),)


def test_a_run_may_switch_them_on_and_off(small, tmp_path):
    quiet = small(steps=2)
    train.train(quiet, tmp_path / "run")
    train.train(with_digests(small, steps=4), tmp_path / "run")
    run = RunFolder(tmp_path / "run")
    with Corpus.open(run.config().data.corpus) as corpus:
        found = replaying.replay(run, 0, 4, corpus=corpus)
    assert found.identical
    have = {
        r["step"]: "microbatch_digests" in r["bits"]
        for r in logbook.read(tmp_path / "run").records
        if r["event"] == "step"
    }
    assert have == {0: False, 1: False, 2: True, 3: True}
    assert config.fingerprint(quiet) == config.fingerprint(with_digests(small, steps=4))
