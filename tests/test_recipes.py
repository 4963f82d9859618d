"""Recipes of other papers: sizes as published, schedules as their tokens say."""

from __future__ import annotations

import pathlib
import re

import pytest
from typer.testing import CliRunner

from palm_jax import cli, config, stream
from palm_jax.plan import parameters

CONFIGS = pathlib.Path(__file__).parents[1] / "configs"
# Of the published checkpoints of OPT, which have two rows of positions more than anything reads.
OPT = {
    "opt_125m": 125_239_296,
    "opt_1.3b": 1_315_758_080,
    "opt_2.7b": 2_651_596_800,
    "opt_6.7b": 6_658_473_984,
    "opt_13b": 12_853_473_280,
    "opt_30b": 29_974_540_288,
}
BLOOM = {
    "bloom_560m": 559_214_592,
    "bloom_1b1": 1_065_314_304,
    "bloom_1b7": 1_722_408_960,
    "bloom_3b": 3_002_557_440,
    "bloom_7b1": 7_069_016_064,
    "bloom_176b": 176_247_271_424,
}


def load(name: str) -> config.Config:
    return config.load(CONFIGS / f"{name}.yaml")


@pytest.mark.parametrize("name", OPT)
def test_opts_models_have_the_published_number_of_parameters(name):
    m = load(name).model
    assert parameters.number(m) == OPT[name] - 2 * m.width


@pytest.mark.parametrize("name", BLOOM)
def test_blooms_models_have_the_published_number_of_parameters(name):
    assert parameters.number(load(name).model) == BLOOM[name]


@pytest.mark.parametrize(
    "name",
    sorted(
        p.stem for which in ("opt", "bloom", "wortsman") for p in CONFIGS.glob(f"{which}_*.yaml")
    ),
)
def test_a_recipe_opens_with_the_number_that_its_dry_run_prints(name):
    opening = (CONFIGS / f"{name}.yaml").read_text().partition("\nseed")[0]
    count = f"{parameters.number(load(name).model):,}"
    assert re.sub(r"\n# *", " ", opening).count(f"{count} parameters") == 1
    if name in ("opt_175b", "bloom_176b"):
        found = CliRunner().invoke(cli.app, ["train", str(CONFIGS / f"{name}.yaml"), "--dry-run"])
        assert found.exit_code == 0, found.output
        assert f"{count} parameters" in found.output


@pytest.mark.parametrize("name", sorted(p.stem for p in CONFIGS.glob("opt_*.yaml")))
def test_opts_rates_fall_to_a_tenth_over_300_billion_tokens(name):
    run = load(name)
    per_step = run.data.ramp.sizes[0] * run.model.sequence_length
    assert run.schedule.decay_steps * per_step == pytest.approx(300e9, rel=1e-5)
    assert run.schedule.final == pytest.approx(run.schedule.peak / 10)
    if name == "opt_175b":
        assert run.schedule.warmup_steps == 2000
    else:
        assert 375e6 <= run.schedule.warmup_steps * per_step < 375e6 + per_step


def test_blooms_schedule_counts_the_sequences_of_its_growing_batch():
    run = load("bloom_176b")
    sizes = [stream.batch_size(run.data.ramp, step) for step in range(run.steps)]
    assert sizes[0] == 192
    assert sizes[-1] == 2048
    assert sum(sizes[: run.schedule.warmup_steps - 1]) < 183_105
    assert sum(sizes[: run.schedule.warmup_steps]) >= 183_105
    missing = run.schedule.decay_steps - run.steps
    assert 0 <= sum(sizes) + missing * 2048 - 200_000_000 < 2048
    assert 0 <= sum(sizes) * 2048 - 366_000_000_000 < 2 * 2048 * 2048
