"""A run's second home: what is copied, when, and a run that comes back from it."""

from __future__ import annotations

import shutil

import pytest
from runs import StopAfter

from palm_jax import train
from palm_jax.errors import CannotDo, WrongInput
from palm_jax.record import folder, inventory, logbook, mirror


def files(path):
    """All that a run's folder says, but its checkpoints."""
    return {
        p.relative_to(path): p.read_bytes()
        for p in path.rglob("*")
        if p.is_file() and p.suffix in (".yaml", ".json", ".jsonl") and "checkpoints" not in p.parts
    }


def steps_in(run):
    return inventory.steps(folder.RunFolder(run).checkpoints(0))


@pytest.fixture
def mirrored(small, tmp_path):
    """mirrored(**overrides): settings whose run has a second home in tmp_path."""
    home = {"checkpoint.mirror": str(tmp_path / "mirror"), "checkpoint.every": 4}
    return lambda **overrides: small(**{**home, **overrides})


def test_mirror_says_what_the_run_says_and_has_its_last_checkpoint(mirrored, tmp_path):
    run, there = tmp_path / "run", tmp_path / "mirror"
    train.train(mirrored(), run, stop_requested=StopAfter(5))
    assert files(there) == files(run)
    assert steps_in(there)[-1] == 6
    train.train(mirrored(), run)
    assert files(there) == files(run)
    assert steps_in(there)[-1] == 12
    last = folder.RunFolder(run).checkpoints(0) / "12"
    copied = folder.RunFolder(there).checkpoints(0) / "12"
    assert {p.relative_to(last): p.read_bytes() for p in last.rglob("*") if p.is_file()} == {
        p.relative_to(copied): p.read_bytes() for p in copied.rglob("*") if p.is_file()
    }


def test_run_whose_folder_is_gone_goes_on_from_its_mirror(mirrored, small, tmp_path):
    straight = train.train(small(), tmp_path / "straight")
    run = tmp_path / "run"
    train.train(mirrored(), run, stop_requested=StopAfter(5))
    shutil.rmtree(run)
    (tmp_path / "mirror.copying").mkdir()  # of a copy that was cut short
    ended = train.train(mirrored(), run)
    assert ended.state_digest == straight.state_digest
    assert [r["step"] for r in logbook.read(run).records if r["event"] == "start"] == [0, 6]


def test_mirror_keeps_the_newest_few(mirrored, tmp_path):
    settings = mirrored(**{"checkpoint.keep_last": 2, "checkpoint.every": 2})
    train.train(settings, tmp_path / "run")
    assert len(steps_in(tmp_path / "mirror")) <= 2
    assert steps_in(tmp_path / "mirror")[-1] == 12


def test_only_every_so_many_steps_are_copied_on_the_way(mirrored, tmp_path, monkeypatch):
    copied = []
    monkeypatch.setattr(mirror.Mirror, "_copy", lambda self: copied.append(1))
    settings = mirrored(**{"checkpoint.every": 1, "checkpoint.mirror_every": 12})
    train.train(settings, tmp_path / "run", stop_requested=StopAfter(8))
    assert len(copied) == 1  # as it ended


def test_mirror_that_cannot_be_written_ends_the_run_by_name(mirrored, tmp_path):
    (tmp_path / "file").write_text("")
    settings = mirrored(**{"checkpoint.mirror": str(tmp_path / "file" / "mirror")})
    with pytest.raises(CannotDo, match=r"checkpoint\.mirror=.*file/mirror could not be written"):
        train.train(settings, tmp_path / "run")
    # The mirror works beside the training: it ends with the next save, or with the last.
    assert steps_in(tmp_path / "run")[-1] in (8, 12)


def test_mirror_of_another_run_is_refused(mirrored, tmp_path):
    train.train(mirrored(), tmp_path / "run", stop_requested=StopAfter(1))
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(WrongInput, match=r"checkpoint\.mirror=.* holds a run of another config"):
        train.train(mirrored(seed=5), tmp_path / "run")
    assert not (tmp_path / "run").exists()
