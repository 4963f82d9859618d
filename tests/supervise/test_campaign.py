"""scripts/faults: a few of its trials, and what it makes of a fault that is not survived."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest

CAMPAIGN = pathlib.Path(__file__).parents[2] / "scripts" / "faulting" / "campaign.py"


def campaign(*arguments, **environ):
    return subprocess.run(
        [sys.executable, str(CAMPAIGN), *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(CAMPAIGN.parents[2]), **environ},
        capture_output=True,
        text=True,
    )


def test_fault_that_there_is_not_is_refused_by_name(tmp_path):
    done = campaign("--only", "earthquake", "--folder", tmp_path / "faults")
    assert done.returncode == 2
    assert "no fault 'earthquake'; there are: kill -9, SIGTERM" in done.stderr
    assert not (tmp_path / "faults").exists()


@pytest.mark.slow
def test_a_few_trials_end_in_the_undisturbed_digest(tmp_path):
    faults, out = "kill -9,flipped bit,torn logbook", tmp_path / "outcomes.json"
    done = campaign(
        *("--trials", 3, "--only", faults, "--folder", tmp_path / "faults", "--json", out)
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "| all | | 3 | 3 | | |"
    outcomes = json.loads(out.read_text())
    assert [outcome["fault"] for outcome in outcomes] == faults.split(",")
    assert all(outcome["survived"] for outcome in outcomes)
