"""`palm-jax spikes list` on logbooks that were written without detection."""

from __future__ import annotations

import json
import pathlib

import pytest
import series
from test_history import run_at, write
from typer.testing import CliRunner

from palm_jax import cli, config
from palm_jax.errors import WrongInput

TINY = pathlib.Path(__file__).parents[2] / "configs" / "tiny.yaml"


@pytest.fixture
def run(tmp_path):
    made = run_at(tmp_path / "run")
    values = series.planted(series.quiet(300), 200, [1.5, 0.8])
    write(made, dict(enumerate(values)) | {250: "nan"})
    settings = config.load(TINY).model_dump(mode="json")
    del settings["spikes"]  # as an older palm_jax wrote it
    (made.path / "config.yaml").write_text(json.dumps(settings))
    return made


def call(*words: object):
    return CliRunner().invoke(cli.app, ["spikes", "list", *map(str, words)])


def test_incidents_are_listed_with_their_outcome(run):
    before = sorted(p.name for p in (run.path / "logbook").iterdir())
    done = call(run.path)
    assert done.exit_code == 0, done.output
    first, second = done.stdout.splitlines()
    assert first.startswith("jump at step 200; loss ")
    assert first.endswith("recovered at 202")
    assert second.startswith("nonfinite at step 250; loss nan, level ")
    assert second.endswith("; 1 step not finite; recovered at 251")
    assert sorted(p.name for p in (run.path / "logbook").iterdir()) == before


def test_json_is_one_strict_object(run):
    def refuse(token: str) -> None:
        raise AssertionError(token)

    done = call(run.path, "--json")
    answer = json.loads(done.stdout, parse_constant=refuse)
    assert [(x["kind"], x["onset"], x["outcome"]) for x in answer["incidents"]] == [
        ("jump", 200, "recovered"),
        ("nonfinite", 250, "recovered"),
    ]
    assert answer["incidents"][1]["value"] == "nan"
    assert (answer["last_step"], answer["alarms"]) == (299, [])


def test_other_settings_show_what_they_would_have_found(run):
    done = call(run.path, "spikes.jump=50", "spikes.sigmas=1000", "--json")
    assert [x["onset"] for x in json.loads(done.stdout)["incidents"]] == [250]


def test_settings_outside_the_section_and_folders_without_a_run_are_refused(run, tmp_path):
    refused = call(run.path, "steps=3").exception
    assert isinstance(refused, WrongInput)
    assert "steps=3" in str(refused)
    assert isinstance(call(tmp_path / "nowhere").exception, WrongInput)


def test_a_quiet_run_says_so(tmp_path, run):
    quiet = run_at(tmp_path / "quiet")
    write(quiet, dict(enumerate(series.quiet(50))))
    (quiet.path / "config.yaml").write_text((run.path / "config.yaml").read_text())
    assert call(quiet.path).stdout.endswith("no incident and no alarm in steps up to 49\n")
