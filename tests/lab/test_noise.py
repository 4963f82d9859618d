"""The gradient noise scale: of gradients drawn from a known distribution, and of a run."""

from __future__ import annotations

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from palm_jax import cli, train
from palm_jax.corpus.reader import Corpus
from palm_jax.errors import WrongInput
from palm_jax.lab import noise, snapshot
from palm_jax.record.folder import RunFolder


def drawn(true, deviation: float, size: int, count: int, seed: int = 0):
    """Mean gradients of `count` batches of `size`, each example's deviation known."""
    chance = np.random.default_rng(seed)
    return [
        {
            "a": (true + deviation / np.sqrt(size) * chance.standard_normal(true.shape))[:600],
            "b": (true + deviation / np.sqrt(size) * chance.standard_normal(true.shape))[600:],
        }
        for _ in range(count)
    ]


def test_noise_scale_of_a_known_distribution():
    true = np.full(1000, 0.03)
    found = noise.of_gradients(drawn(true, 0.5, size=8, count=64), step=3, batch=16, size=8)
    # |G|^2 is 1000 x 0.03^2 = 0.9, the variance of an example 1000 x 0.5^2 = 250.
    assert found.noise_scale == pytest.approx(250 / 0.9, abs=4 * found.standard_error)
    assert 0 < found.standard_error < 0.2 * found.noise_scale
    assert (found.small_batches, found.batch, found.step) == (64, 16, 3)


def test_standard_error_is_the_scatter_between_repetitions():
    true = np.full(1000, 0.03)
    several = [
        noise.of_gradients(drawn(true, 0.5, 8, 32, seed), step=0, batch=8, size=8)
        for seed in range(40)
    ]
    scatter = np.std([one.noise_scale for one in several])
    told = np.mean([one.standard_error for one in several])
    # Forty repetitions know a standard deviation to 11%, and the jackknife is no better.
    assert told == pytest.approx(scatter, rel=0.4)


def test_a_gradient_that_is_noise_alone_has_no_scale():
    gradients = drawn(np.zeros(1000), 1.0, size=8, count=4, seed=2)
    total = sum(np.concatenate([g["a"], g["b"]]) for g in gradients) / 4
    mean_of_squares = np.mean([sum(np.sum(x**2) for x in g.values()) for g in gradients])
    found = noise.of_gradients(gradients, step=0, batch=8, size=8)
    negative = 32 * np.sum(total**2) < 8 * mean_of_squares
    assert (found.noise_scale is None) == negative


@pytest.fixture(scope="module")
def trained(small, tmp_path_factory):
    path = tmp_path_factory.mktemp("noise") / "run"
    # One block of eight sequences, then two of them.
    settings = small(**{"data.ramp": {"starts": [0, 2], "sizes": [8, 16]}, "steps": 4})
    train.train(settings, path)
    return RunFolder(path)


def test_blocks_of_a_batch_average_to_its_gradient(trained):
    settings = trained.config()
    with Corpus.open(settings.data.corpus) as corpus:
        found = noise.measure(trained, corpus, settings, 2, 1)
        whole = snapshot.take(trained, corpus, settings, 2).gradient
    assert (found.step, found.batch, found.small_batch, found.small_batches) == (2, 16, 8, 2)
    squared = sum(np.sum(np.square(g, dtype=np.float64)) for g in whole.values())
    # Float32 sums in another order.
    assert found.large_norm_squared == pytest.approx(squared, rel=1e-5)
    assert found.small_norm_squared > found.large_norm_squared


def test_the_command_measures_each_checkpoint(trained, monkeypatch):
    monkeypatch.setattr("palm_jax.cli.noise.prepare_jax", lambda settings: None)
    words = ["lab", "noise-scale", str(trained.path), "--batches", "2"]
    done = CliRunner().invoke(cli.app, [*words, "--json"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert [one["step"] for one in told["steps"]] == [4]
    (one,) = told["steps"]
    assert one["small_batches"] == 4
    if one["noise_scale"] is not None:
        assert one["noise_scale_tokens"] == one["noise_scale"] * 8


def test_what_cannot_be_measured_is_refused(trained):
    settings = trained.config()
    with Corpus.open(settings.data.corpus) as corpus:
        with pytest.raises(WrongInput, match=r"--batches 1: that is one block of 8 sequences"):
            noise.measure(trained, corpus, settings, 0, 1)
        with pytest.raises(WrongInput, match=r"--step 9: segment 0 of .* has steps 0 to 4"):
            noise.measure(trained, corpus, settings, 9, 1)
