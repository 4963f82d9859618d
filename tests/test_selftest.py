"""The test that a person runs on a machine: what it tries, and what it calls different."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import hypothesis
import pytest
from hypothesis import strategies
from typer.testing import CliRunner

from palm_jax import cli, config, errors, parity, probe, selftest
from palm_jax.selftest import Record, Trial

ROOT = pathlib.Path(__file__).parents[1]


@hypothesis.given(strategies.sampled_from(["tpu", "gpu"]), strategies.integers(1, 64))
def test_tiny_run_takes_all_devices_of_an_accelerator(platform, num_devices):
    mesh = config.from_dict(selftest.tiny_settings(platform, num_devices, False)).mesh
    assert mesh.data_parallel * mesh.tensor == num_devices
    assert mesh.emulated_devices is None


def test_tiny_run_emulates_devices_on_a_cpu_unless_told_otherwise():
    settings = config.from_dict(selftest.tiny_settings("cpu", 1, False))
    assert settings.mesh.emulated_devices == settings.mesh.data_parallel > 1
    assert config.from_dict(selftest.tiny_settings("cpu", 1, True)).mesh == config.Mesh()


STRAIGHT = Record({0: [{"loss": "40b1"}], 1: [{"loss": "40a0"}]}, {2: "feed"})


@pytest.mark.parametrize(
    ("again", "expected"),
    [
        (Record({0: [{"loss": "40b1"}], 1: [{"loss": "40a0"}] * 2}, {2: "feed"}), None),
        (
            # The first attempt of a step counts as much as the last.
            Record({0: [{"loss": "40b1"}], 1: [{"loss": "40a1"}, {"loss": "40a0"}]}, {2: "feed"}),
            {"step": 1, "field": "loss", "straight": "40a0", "again": "40a1"},
        ),
        (
            Record({0: [{"loss": "40b1"}]}, {2: "feed"}),
            {"step": 1, "field": "loss", "straight": "40a0", "again": None},
        ),
        (
            Record({0: [{"loss": "40b1", "norm": "0"}], 1: [{"loss": "40a0"}]}, {2: "feed"}),
            {"step": 0, "field": "norm", "straight": None, "again": "0"},
        ),
        (
            Record(STRAIGHT.steps, {2: "beef"}),
            {"step": 2, "field": "state_digest", "straight": "feed", "again": "beef"},
        ),
        (
            Record(STRAIGHT.steps, {}),
            {"step": 2, "field": "state_digest", "straight": "feed", "again": None},
        ),
    ],
)
def test_first_difference_is_found_wherever_it_is(again, expected):
    assert selftest.first_difference(STRAIGHT, again) == expected


def test_settings_that_the_test_decides_are_refused(tmp_path):
    for override in ("steps=3", "checkpoint.every=2", "data.corpus=x", "log.every=5"):
        with pytest.raises(errors.WrongInput) as caught:
            selftest.bits(tmp_path, [override])
        assert override.partition("=")[0] in str(caught.value)


def test_several_hosts_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(probe, "ask", lambda *question, **given: {"processes": 2})
    with pytest.raises(errors.CannotDo) as caught:
        selftest.bits(tmp_path)
    assert "2 processes" in str(caught.value)


def test_commands_that_fail_say_why(tmp_path):
    place = selftest.Place(tmp_path)
    with pytest.raises(errors.WrongInput) as caught:
        place("train", "missing.yaml", "--run", "run")
    assert "missing.yaml" in str(caught.value)
    assert "error: " not in str(caught.value)


class Saying(selftest.Place):
    """Its commands are a script in Python."""

    script = ""

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", self.script],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )


def test_run_is_killed_at_its_step_or_found_to_have_ended(tmp_path):
    place = Saying(tmp_path)
    place.script = """
import itertools, sys, time
for step in itertools.count(1):
    print(f"step {step}/20", file=sys.stderr, flush=True)
    time.sleep(0.2 if step > 9 else 0)
"""
    assert place.killed_after(9, "train")
    place.script = "import sys; print('step 1/20', file=sys.stderr)"
    assert not place.killed_after(9, "train")


def test_defect_of_a_command_is_no_answer(tmp_path):
    place = Saying(tmp_path)
    place.script = "raise TypeError('ours')"
    with pytest.raises(errors.CannotDo) as caught:
        place("replay", answers=(0,))
    assert "TypeError: ours" in str(caught.value)


REPLAY = {
    "identical": False,
    "compared_steps": 14,
    "fields": ["loss", "norm", "state_digest"],
    "compared_digests": [8, 12],
    "first_difference": {"step": 7, "field": "norm", "recorded": "3f", "replayed": "3e"},
}


def test_replay_that_differs_is_told_as_such(tmp_path):
    place = Saying(tmp_path)
    place.script = f"print({json.dumps(json.dumps(REPLAY))}); exit(1)"
    assert selftest._replayed(place, "replayed", 6, []) == Trial(
        "replayed",
        "DIFFERENT",
        "14 steps x 3 fields, 2 states",
        {"step": 7, "field": "norm", "straight": "3f", "again": "3e"},
    )


def other_mesh(platform: str, *overrides: str) -> tuple[list[str], Trial | None]:
    """What would be replayed, or the trial that says why nothing is."""
    asked: list[str] = []

    class Fake:
        def __call__(self, *arguments: str, answers: tuple[int, ...]) -> dict:
            asked.extend(arguments)
            return {**REPLAY, "identical": True, "first_difference": None}

    settings = selftest.tiny_settings(platform, 1, bool(overrides))
    wanted = config.override(config.from_dict(settings), overrides)
    trial = selftest._on_another_mesh(Fake(), wanted, platform, lambda text: None)
    return [text for text in asked if "mesh" in text], trial


def test_other_mesh_has_fewer_devices_where_they_are_emulated():
    asked, trial = other_mesh("cpu")
    assert asked == ["mesh.data=1", "mesh.fsdp=1", "mesh.emulated_devices=1"]
    assert trial.verdict == "identical"
    assert trial.what == "replayed on 1 device instead of 4"
    split = ("mesh.fsdp=2", "mesh.tensor=2", "mesh.emulated_devices=4")
    assert other_mesh("cpu", *split)[0][-1] == "mesh.emulated_devices=2"


def test_other_mesh_leaves_no_device_of_an_accelerator_idle():
    assert other_mesh("tpu", "mesh.fsdp=8")[0] == ["mesh.data=8", "mesh.fsdp=1"]
    assert other_mesh("tpu", "mesh.fsdp=2", "mesh.data=2")[0] == ["mesh.data=4", "mesh.fsdp=1"]


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["mesh.tensor=2"], "one data-parallel"),
        (["numerics.reduction=fast", "mesh.fsdp=2"], "only"),
    ],
)
def test_other_mesh_is_not_tried_where_nothing_is_promised(overrides, reason):
    asked, trial = other_mesh("tpu", *overrides)
    assert asked == []
    assert trial.verdict == "not tried"
    assert reason in trial.compared


def reported(monkeypatch, *trials: Trial, arguments: tuple[str, ...] = ()):
    report = selftest.Report(
        "cpu", "cpu", 4, {"data": 2, "fsdp": 2, "emulated_devices": 4}, "feed", trials
    )
    monkeypatch.setattr(selftest, "bits", lambda *given: report)
    return CliRunner().invoke(cli.app, ["selftest", "bits", *arguments])


def test_different_bits_are_the_answer_no(monkeypatch):
    difference = {"step": 7, "field": "norm", "straight": "3f", "again": "3e"}
    different = Trial("replayed", "DIFFERENT", "14 steps", difference)
    done = reported(monkeypatch, Trial("resumed", "identical", "20 steps"), different)
    assert done.exit_code == 1
    assert "first difference: step 7, norm: 3f, again 3e" in done.stdout
    assert "identical: false" in done.stdout
    assert "gave the bits" not in done.stdout
    done = reported(monkeypatch, different, arguments=("--json",))
    assert done.exit_code == 1
    said = json.loads(done.stdout)
    assert (said["identical"], said["proves"]) == (False, None)


def test_what_could_not_be_tried_is_no_difference(monkeypatch):
    tried, untried = Trial("a", "identical", "20 steps"), Trial("b", "not tried", "one device")
    done = reported(monkeypatch, tried, untried)
    assert done.exit_code == 0
    assert "not tried  b  one device" in done.stdout
    assert "identical: true" in done.stdout


def parity_said(small, tmp_path, monkeypatch, *arguments: str, **changes):
    (tmp_path / "small.yaml").write_text(config.to_yaml(small(**changes)))
    # It would emulate devices anew in a process that has them.
    monkeypatch.setattr("palm_jax.cli.selftest.prepare_jax", lambda settings: None)
    return CliRunner().invoke(
        cli.app, ["selftest", "parity", str(tmp_path / "small.yaml"), *arguments]
    )


def test_losses_of_a_mesh_are_close_to_those_of_one_device(small, tmp_path, monkeypatch):
    mesh = {"mesh.fsdp": 2, "mesh.tensor": 2}
    done = parity_said(small, tmp_path, monkeypatch, "--json", **mesh)
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)
    assert said["close"] is True
    assert said["sequences"] == 4
    assert said["difference"] < said["tolerance"] == parity.TOLERANCE["float32"]


def test_losses_too_far_apart_are_the_answer_no(small, tmp_path, monkeypatch):
    monkeypatch.setitem(parity.TOLERANCE, "float32", -1.0)
    done = parity_said(small, tmp_path, monkeypatch)
    assert done.exit_code == 1
    assert "close enough: false" in done.stdout
    assert "JAX_DEFAULT_MATMUL_PRECISION=highest" in done.stderr


def test_losses_that_a_cpu_cannot_compute_are_no_answer(small, tmp_path, monkeypatch):
    monkeypatch.setattr(parity, "LARGEST", 1)
    done = parity_said(small, tmp_path, monkeypatch)
    assert isinstance(done.exception, errors.CannotDo)
    assert "parameters are more than the 1 that" in str(done.exception)


@pytest.mark.slow
def test_this_machine_gives_equal_bits(tmp_path):
    environ = {k: v for k, v in os.environ.items() if k not in ("NPROC", "XLA_FLAGS")}
    done = subprocess.run(
        [sys.executable, "-m", "palm_jax.cli", "selftest", "bits", "log.vitals=basic", "--json"],
        env={**environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=1800,  # so that a hang ends
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["identical"] is True
    assert [trial["verdict"] for trial in said["trials"]] == ["identical"] * 3
    assert "executed twice" in said["trials"][0]["compared"]
    assert said["trials"][0]["compared"].startswith("20 steps x ")
    assert list(tmp_path.iterdir()) == []
