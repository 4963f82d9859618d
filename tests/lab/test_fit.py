"""Fits give back the law that made the losses, and refuse what no law can be told from."""

from __future__ import annotations

import csv
import json

import numpy as np
import pytest
from scipy.optimize import approx_fprime
from typer.testing import CliRunner

from palm_jax import cli
from palm_jax.errors import WrongInput
from palm_jax.lab import fit
from palm_jax.plan import scaling_laws

PRINTED = scaling_laws.CHINCHILLA["printed"]
SIZES = np.geomspace(5e7, 1e10, 7)


def made(law, noise: float = 0.0, seed: int = 0) -> fit.Runs:
    """Seven sizes, each on five numbers of tokens."""
    pairs = [(n, n * ratio) for n in SIZES for ratio in (2, 6, 20, 60, 200)]
    chance = np.random.default_rng(seed)
    losses = [law.loss(n, d) * np.exp(noise * chance.standard_normal()) for n, d in pairs]
    return fit.Runs(*(np.array(column) for column in (*zip(*pairs, strict=True), losses)))


def write(path, runs: fit.Runs, **columns):
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["parameters", "tokens", "loss", *columns])
        for row in zip(
            runs.parameters_R, runs.tokens_R, runs.loss_R, *columns.values(), strict=True
        ):
            writer.writerow(row)
    return path


def test_noiseless_losses_give_back_chinchillas_constants_from_many_starts():
    found = fit.fit(made(PRINTED), fit.FORMS["chinchilla"], fit.some(fit.FORMS["chinchilla"], 20))
    for name in ("E", "alpha", "beta"):
        assert getattr(found.law, name) == pytest.approx(getattr(PRINTED, name), rel=0.01)
    assert found.ends_alike > 1


def test_noiseless_losses_give_back_kaplans_constants():
    form = fit.FORMS["kaplan"]
    found = fit.fit(made(scaling_laws.KAPLAN), form, fit.some(form, 12))
    assert found.law.alpha_parameters == pytest.approx(0.076, rel=0.01)
    assert found.law.alpha_tokens == pytest.approx(0.103, rel=0.01)


@pytest.mark.parametrize("name", sorted(fit.FORMS))
def test_gradient_is_that_of_the_objective(name):
    form, runs = fit.FORMS[name], made(PRINTED, noise=0.01)
    logs = np.log(runs.parameters_R), np.log(runs.tokens_R), np.log(runs.loss_R)
    theta = np.array([6.1, 7.2, 0.4, 0.33, 0.3] if name == "chinchilla" else [31.0, 30.0, 0.7, 0.1])
    value, gradient = fit.objective(form, theta, logs)
    numeric = approx_fprime(theta, lambda t: fit.objective(form, t, logs)[0], 1e-7)
    # Finite differences of a function of about 0.01 are known to about 1e-8 / 1e-7 of it.
    np.testing.assert_allclose(gradient, numeric, rtol=1e-3, atol=1e-5 * abs(value) / 1e-3)


def test_one_wild_run_moves_the_fit_little():
    runs = made(PRINTED)
    runs.loss_R[3] *= 1.5
    found = fit.fit(runs, fit.FORMS["chinchilla"], fit.some(fit.FORMS["chinchilla"], 12)).law
    assert pytest.approx(PRINTED.E, rel=0.01) == found.E


def test_intervals_hold_the_law_that_made_the_losses():
    runs, form = made(PRINTED, noise=0.002, seed=3), fit.FORMS["chinchilla"]
    found = fit.fit(runs, form, fit.some(form, 8))
    laws = fit.bootstrap(runs, form, found, 15)
    low, high = fit.interval(law.alpha for law in laws)
    assert low < PRINTED.alpha < high
    assert high - low < 0.1
    assert [law.E for law in fit.bootstrap(runs, form, found, 2)] == [law.E for law in laws[:2]]


def test_active_parameters_and_quality_stand_for_what_they_say(tmp_path):
    runs = made(PRINTED)
    twice = fit.Runs(runs.parameters_R * 3, runs.tokens_R / 2, runs.loss_R)
    path = write(
        tmp_path / "losses.csv",
        twice,
        active_parameters=runs.parameters_R,
        quality=np.full(len(runs), 2.0),
    )
    found = fit.read(path)
    np.testing.assert_allclose(found.parameters_R, runs.parameters_R, rtol=1e-12)
    np.testing.assert_allclose(found.tokens_R, runs.tokens_R, rtol=1e-12)


RUNS = made(PRINTED)


def one_line() -> fit.Runs:
    losses = [PRINTED.loss(n, 20 * n) for n in np.geomspace(1e7, 1e10, 20)]
    return fit.Runs(np.geomspace(1e7, 1e10, 20), 20 * np.geomspace(1e7, 1e10, 20), np.array(losses))


@pytest.mark.parametrize(
    ("runs", "message"),
    [
        (RUNS.chosen(np.arange(9)), "has 9 runs; a law of five constants needs at least 10"),
        (RUNS.chosen(np.zeros(20, int)), "parameters is 1.00 times the smallest"),
        (one_line(), "tokens follow from parameters"),
        (fit.Runs(RUNS.parameters_R, RUNS.tokens_R, np.full(35, 2.0)), "only 1 different losses"),
    ],
)
def test_runs_that_tell_no_law_are_refused(tmp_path, runs, message):
    with pytest.raises(WrongInput, match=message):
        fit.read(write(tmp_path / "losses.csv", runs))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("parameters,tokens,loss\n1e9,1e10,nan\n", r":2: loss is nan; it must be finite"),
        ("parameters,tokens,loss\n1e9,-4,2\n", r":2: tokens is -4"),
        ("parameters,tokens,loss\n1e9,many,2\n", r"tokens is 'many', not a number"),
        ("parameters,loss\n1e9,2\n", r"there is nothing in column `tokens`"),
        ("", r"has 0 runs"),
    ],
)
def test_files_that_are_no_losses_are_refused(tmp_path, text, message):
    (tmp_path / "losses.csv").write_text(text)
    with pytest.raises(WrongInput, match=message):
        fit.read(tmp_path / "losses.csv")


def test_the_command_prints_constants_budgets_and_a_page(tmp_path):
    path = write(tmp_path / "losses.csv", made(PRINTED, noise=0.002))
    words = ["lab", "fit", str(path), "--starts", "8", "--bootstrap", "3"]
    done = CliRunner().invoke(
        cli.app, [*words, "--flops", "1e21", "--out", str(tmp_path / "out"), "--json"]
    )
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert told["constants"]["alpha"] == pytest.approx(0.34, abs=0.03)
    low, high = told["intervals_90_percent"]["alpha"]
    assert low <= high
    (best,) = told["optima"]
    assert 6 * best["parameters"] * best["tokens"] == pytest.approx(1e21)
    assert (tmp_path / "out/fit.html").read_text().count("<circle") == 35
    with (tmp_path / "out/residuals.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 35
    for row in rows:
        assert float(row["predicted_loss"]) == pytest.approx(float(row["loss"]), rel=0.02)
    shown = CliRunner().invoke(cli.app, words)
    assert "starts that ended here" in shown.output
    wrong = CliRunner().invoke(cli.app, [*words, "--law", "moore"])
    assert isinstance(wrong.exception, WrongInput)
