"""`palm-jax checkpoints` on runs made by hand: nothing is trained here."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
import sys
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

from palm_jax import cli, config, upkeep
from palm_jax.corpus import manifest
from palm_jax.errors import CannotDo, WrongInput
from palm_jax.record import chronicle, folder, inventory, logbook
from palm_jax.record.checkpoints import Checkpoints
from palm_jax.record.folder import RunFolder
from palm_jax.record.segments import Segment
from palm_jax.replay import branches

KEEP_ALL = config.Checkpoint(keep_last=100)
STEPS = (10, 20, 30, 40, 50)


def state_of(step: int) -> dict[str, Any]:
    w_DF = np.random.default_rng(step).normal(size=(64, 64)).astype(np.float32)
    return {"step": jnp.int32(step), "w_DF": jnp.asarray(w_DF)}


def save(run: RunFolder, segment: int, *steps: int) -> None:
    with (
        logbook.Logbook.open(run.path) as book,
        Checkpoints(run.checkpoints(segment), KEEP_ALL) as saved,
    ):
        for step in steps:
            digest = saved.save(step, state_of(step), {"segment": segment}, 5 - step / 100)
            book.append("checkpoint", segment=segment, step=step, state_digest=digest.whole)


@pytest.fixture(scope="module")
def original(small, corpus_folder, tmp_path_factory) -> pathlib.Path:
    """A run of one segment with five checkpoints, and a branch with one."""
    run = RunFolder(tmp_path_factory.mktemp("original") / "run")
    settings = small(**{"spikes.rewind_steps": 5, "mesh.fsdp": 4})
    folder.create(run, settings, manifest.read(corpus_folder), Segment())
    save(run, 0, *STEPS)
    branch, _ = branches.create_branch(run, 25, branches.Changes(), name="half")
    save(branch, 0, 28)
    return run.path


@pytest.fixture
def run(original: pathlib.Path, tmp_path: pathlib.Path) -> RunFolder:
    return RunFolder(pathlib.Path(shutil.copytree(original, tmp_path / "run")))


@pytest.fixture(autouse=True)
def jax_as_it_is(monkeypatch):
    monkeypatch.setattr("palm_jax.cli.checkpoints.prepare_one_cpu", lambda settings: None)


def checkpoints(*arguments: object) -> Any:
    return CliRunner().invoke(cli.app, ["checkpoints", *map(str, arguments)])


def answer(*arguments: object, code: int = 0) -> dict[str, Any]:
    done = checkpoints(*arguments, "--json")
    assert done.exit_code == code, (done.output, done.exception)
    return json.loads(done.stdout)


def steps_of(run: RunFolder, segment: int = 0) -> list[int]:
    names = [path.name for path in run.checkpoints(segment).iterdir()]
    return sorted(int(name) for name in names)  # fails where a leftover is


def flip(run: RunFolder, step: int, segment: int = 0) -> None:
    """One bit in the largest file of the arrays, which holds `w_DF`."""
    files = (run.checkpoints(segment) / str(step) / "state").rglob("*")
    largest = max((p for p in files if p.is_file()), key=lambda p: p.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(data)


def change_record(run: RunFolder, step: int) -> None:
    record = run.checkpoints(0) / str(step) / "record" / "metadata"
    record.write_text(record.read_text().replace("held_out_loss", "held_out_lost"))


def leave_behind(run: RunFolder) -> pathlib.Path:
    """What a save that was killed leaves: 1000 bytes."""
    left = run.checkpoints(0) / "60.orbax-checkpoint-tmp"
    left.mkdir()
    (left / "array").write_bytes(b"x" * 1000)
    return left


def has_incident(run: RunFolder, onset: int, segment: int = 0) -> None:
    with logbook.Logbook.open(run.path) as book:
        book.append("incident", segment=segment, step=onset, onset=onset, kind="jump")


def walked(path: pathlib.Path) -> int:
    return sum(
        os.lstat(os.path.join(place, name)).st_size
        for place, _, names in os.walk(path)
        for name in names
    )


def pruned_events(run: RunFolder) -> list[dict[str, Any]]:
    return [r for r in logbook.read(run.path).records if r["event"] == "pruned"]


def tree(path: pathlib.Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in path.rglob("*") if p.is_file()}


# --- list ---


def test_list_tells_size_loss_digest_needs_and_leftovers(run):
    leave_behind(run)
    change_record(run, 30)
    has_incident(run, 42)
    said = answer("list", run.path)
    mine, half = said["segments"]
    assert [c["step"] for c in mine["checkpoints"]] == list(STEPS)
    assert [c["bytes"] for c in mine["checkpoints"]] == [
        walked(run.checkpoints(0) / str(step)) for step in STEPS
    ]
    told = {
        r["step"]: r["state_digest"]
        for r in logbook.read(run.path).records
        if r["event"] == "checkpoint"
    }
    for c in mine["checkpoints"]:
        damaged = c["step"] == 30
        assert c["digest"] == (None if damaged else told[c["step"]])
        assert c["held_out_loss"] == (None if damaged else 5 - c["step"] / 100)
        assert (c["problem"] is not None) == damaged
    needed = {c["step"]: c["needed"] for c in mine["checkpoints"]}
    pinned = "pinned by the incident at step 42"
    assert needed == {
        10: [pinned],
        20: ["branch half departs from it", pinned],
        30: [],
        40: [pinned],
        50: ["training goes on from it"],
    }
    assert mine["leftovers"] == [{"name": "60.orbax-checkpoint-tmp", "bytes": 1000}]
    assert (half["branch"], half["segment"], half["start_step"]) == ("half", 0, 25)
    assert [c["step"] for c in half["checkpoints"]] == [28]
    all_bytes = walked(run.checkpoints(0)) + walked(run.path / "branches/half/segments")
    described = (run.path / "branches/half/segments/000/segment.json").stat().st_size
    assert said["bytes"] == all_bytes - described
    assert said["leftover_bytes"] == 1000
    disk = os.statvfs(run.path)
    assert said["free_disk_bytes"] == pytest.approx(disk.f_bavail * disk.f_frsize, rel=0.05)


def test_list_tells_a_person(run):
    leave_behind(run)
    change_record(run, 30)
    done = checkpoints("list", run.path)
    assert done.exit_code == 0
    lines = done.stdout.splitlines()
    assert lines[0] == "segment 0, from step 0"
    assert any("  30 " in line and "DAMAGED: its record" in line for line in lines)
    assert any("  50 " in line and "4.5000" in line for line in lines)
    assert "  left behind: 60.orbax-checkpoint-tmp, 1000 bytes" in lines
    assert "branch half, segment 0, from step 25" in lines
    assert lines[-1].startswith("6 checkpoints, ")


def test_list_changes_nothing(run):
    leave_behind(run)
    before = tree(run.path)
    checkpoints("list", run.path)
    assert tree(run.path) == before


# --- verify ---


def test_sound_checkpoints_are_ok(run):
    done = checkpoints("verify", run.path)
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines() == [
        *(f"segment 0, checkpoint {step}: ok" for step in STEPS),
        "branch half, segment 0, checkpoint 28: ok",
    ]
    assert "reading checkpoint 50 of segment 0 ..." in done.stderr


def test_damage_is_named_and_so_is_where_the_run_would_go_on(run):
    flip(run, 50)
    change_record(run, 40)
    (run.checkpoints(0) / "30" / "state" / "_METADATA").unlink()
    said = answer("verify", run.path, code=1)
    problems = {(c["branch"], c["step"]): c["problems"] for c in said["checkpoints"]}
    assert problems.pop((None, 50)) == ["w_DF has other bits than were saved"]
    assert "checksum does not fit" in problems.pop((None, 40))[0]
    assert problems.pop((None, 30)) == ["it lacks state/_METADATA"]
    assert not any(problems.values())
    assert said["damaged"] == 3
    (where,) = said["goes_on"]
    assert (where["branch"], where["segment"], where["checkpoint"]) == (None, 0, 20)
    assert where["damaged"] == [50, 40]
    done = checkpoints("verify", run.path)
    assert done.exit_code == 1
    assert "segment 0, checkpoint 50: DAMAGED: w_DF has other bits than were saved" in done.stdout
    last = done.stdout.splitlines()[-1]
    assert "the run would go on from checkpoint 20 of segment 0" in last
    assert f"`palm-jax checkpoints prune {run.path} --damaged`" in last


def test_damage_to_an_older_checkpoint_does_not_keep_the_run_from_going_on(run):
    flip(run, 10)
    done = checkpoints("verify", run.path, "--step", 10)
    assert done.exit_code == 1
    assert done.stdout.splitlines()[-1] == "the run goes on from checkpoint 50 of segment 0"


def test_a_branch_without_sound_checkpoints_goes_on_from_that_of_its_run(run):
    flip(RunFolder(run.path / "branches" / "half"), 28)
    flip(run, 20)
    said = answer("verify", run.path, "--step", 28, code=1)
    (where,) = said["goes_on"]
    assert (where["branch"], where["checkpoint"]) == ("half", 10)
    assert where["run"] == str(run.path)
    # What is damaged in the run is passed over by itself.
    assert where["damaged"] == [28]


def test_without_any_sound_checkpoint_the_run_begins_anew(run):
    for step in STEPS:
        change_record(run, step)
    (where,) = answer("verify", run.path, code=1)["goes_on"]
    assert where["checkpoint"] is None
    assert where["damaged"] == list(reversed(STEPS))


def test_another_digest_than_in_the_logbook_is_damage(run):
    # The sound checkpoint of another run, say.
    shutil.rmtree(run.checkpoints(0) / "50")
    other = RunFolder(run.path.parent / "other")
    with Checkpoints(other.checkpoints(0), KEEP_ALL) as saved:
        digest = saved.save(50, state_of(51), {}, None)
    shutil.copytree(other.checkpoints(0) / "50", run.checkpoints(0) / "50")
    said = answer("verify", run.path, "--segment", 0, code=1)
    problems = {c["step"]: c["problems"] for c in said["checkpoints"]}
    ((problem,),) = [found for found in problems.values() if found]
    assert problems[50] == [problem]
    assert f"its digest is {digest.whole}, but the logbook has" in problem


def test_checkpoint_that_the_logbook_does_not_know_is_ok_and_said_to_be_unknown(run):
    with Checkpoints(run.checkpoints(0), KEEP_ALL) as saved:
        saved.save(60, state_of(60), {}, None)
    done = checkpoints("verify", run.path, "--step", 60)
    assert done.exit_code == 0
    assert done.stdout == "segment 0, checkpoint 60: ok (the logbook does not tell of it)\n"


def test_verify_in_a_process_of_its_own_uses_one_cpu_and_waits_for_nobody(run):
    flip(run, 50)
    done = subprocess.run(
        [sys.executable, "-m", "palm_jax.cli", "checkpoints", "verify", run.path, "--step", "50"],
        env={
            **{k: v for k, v in os.environ.items() if k != "XLA_FLAGS"},
            "PYTHONPATH": str(pathlib.Path(__file__).parent.parent),
            # As in a shell that has trained on TPUs with two processes; neither is there now.
            "JAX_COORDINATOR_ADDRESS": "localhost:1",
            "PALM_JAX_NUM_PROCESSES": "2",
            "PALM_JAX_PROCESS_ID": "1",
            "JAX_PLATFORMS": "tpu",
        },
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    first, last = done.stdout.splitlines()
    assert first == "segment 0, checkpoint 50: DAMAGED: w_DF has other bits than were saved"
    assert "would go on from checkpoint 40" in last
    assert set(done.stderr.splitlines()) == {
        "reading checkpoint 50 of segment 0 ...",
        "reading checkpoint 40 of segment 0 ...",
    }


# --- prune ---


def test_prune_keeps_the_newest_and_every_kth_and_what_a_branch_departs_from(run):
    leave_behind(run)
    gone = [run.checkpoints(0) / str(10), run.checkpoints(0) / "60.orbax-checkpoint-tmp"]
    size = sum(map(walked, gone))
    before = tree(run.checkpoints(0))
    said = answer("prune", run.path, "--keep-last", 2, "--keep-every", 15)
    assert said["freed_bytes"] == size
    assert steps_of(run) == [20, 30, 40, 50]
    kept = {k: v for k, v in before.items() if not any(k.startswith(f"{p}/") for p in gone)}
    assert tree(run.checkpoints(0)) == kept
    (segment,) = said["segments"]
    assert segment["steps"] == [10]
    assert segment["kept"] == {"20": ["branch half departs from it"]}
    assert segment["leftovers"] == ["60.orbax-checkpoint-tmp"]
    (event,) = pruned_events(run)
    assert (event["segment"], event["steps"], event["damaged"]) == (0, [10], [])
    assert (event["newest_left"], event["bytes"]) == (50, size)
    assert steps_of(RunFolder(run.path / "branches" / "half")) == [28]


def test_a_dry_run_tells_the_same_and_removes_nothing(run):
    leave_behind(run)
    before = tree(run.path)
    would = answer("prune", run.path, "--keep-last", 1, "--dry-run")
    assert tree(run.path) == before
    done = answer("prune", run.path, "--keep-last", 1)
    assert (would.pop("dry_run"), done.pop("dry_run")) == (True, False)
    assert would == done
    assert steps_of(run) == [20, 50]


def test_prune_tells_a_person(run):
    leave_behind(run)
    done = checkpoints("prune", run.path, "--keep-last", 1)
    first, *kept, last = done.stdout.splitlines()
    assert first == "segment 0: removed 10, 30, 40; the newest left is 50"
    assert kept == [
        "  kept 20: branch half departs from it",
        "  removed what was left behind: 60.orbax-checkpoint-tmp",
    ]
    assert last.startswith("freed ")
    assert last.endswith(" KiB")


def test_pinned_checkpoints_stay_unless_they_may_go_too(run):
    has_incident(run, 42)
    answer("prune", run.path, "--keep-last", 1)
    assert steps_of(run) == [10, 20, 30, 40, 50]
    answer("prune", run.path, "--keep-last", 1, "--also-pinned")
    assert steps_of(run) == [20, 50]


def test_incident_soon_after_a_departure_pins_checkpoints_of_the_segment_before(run):
    branches.intervene(run, 34, branches.Changes(("schedule.peak=0.001",)), "to see")
    save(run, 1, 60)
    has_incident(run, 61, segment=1)
    there = upkeep.usable(run)
    assert there == {0: list(STEPS), 1: [60]}
    # Those of steps 40 and 50 belong to the future that was left.
    assert set(upkeep.pinned(run, there)) == {(1, 60), (0, 30), (0, 20), (0, 10)}


def test_state_that_a_later_segment_begins_with_stays(run):
    branches.intervene(run, 34, branches.Changes(("schedule.peak=0.001",)), "to see")
    assert answer("prune", run.path, "--keep-last", 1)["segments"][0]["steps"] == [10, 40]
    assert steps_of(run) == [20, 30, 50]
    # The new segment has no checkpoint of its own: this is where the run goes on.
    where = upkeep.goes_on(run, lambda place: True)
    assert (where.segment, where.step) == (0, 30)


def test_only_the_named_segment_is_pruned(run):
    branches.intervene(run, 50, branches.Changes(("schedule.peak=0.001",)), "to see")
    save(run, 1, 60, 70, 80)
    answer("prune", run.path, "--keep-last", 1, "--segment", 1)
    assert (steps_of(run, 0), steps_of(run, 1)) == ([10, 20, 30, 40, 50], [80])


def test_damaged_checkpoints_go_and_the_newest_sound_one_stays(run):
    flip(run, 50)
    change_record(run, 40)
    (run.checkpoints(0) / "30" / "state" / "_METADATA").unlink()
    said = answer("prune", run.path, "--damaged")
    assert steps_of(run) == [10, 20]
    (segment,) = said["segments"]
    assert segment["damaged"]["50"] == ["w_DF has other bits than were saved"]
    assert segment["leftovers"] == ["30"]
    (event,) = pruned_events(run)
    assert (event["steps"], event["damaged"], event["newest_left"]) == ([40, 50], [40, 50], 20)
    assert answer("verify", run.path)["damaged"] == 0


def test_damaged_ones_do_not_count_among_the_newest(run):
    change_record(run, 50)  # seen without reading arrays
    said = answer("prune", run.path, "--keep-last", 1)
    assert said["segments"][0]["unreadable"] == [50]
    assert steps_of(run) == [20, 40, 50]
    flip(run, 40)
    answer("prune", run.path, "--keep-last", 1, "--damaged")
    assert steps_of(run) == [20]


def test_run_that_another_process_writes_to_is_left_alone(run):
    holds = "import fcntl, os, sys; fcntl.flock(os.open(sys.argv[1], os.O_RDONLY), fcntl.LOCK_EX)"
    process = subprocess.Popen(
        [sys.executable, "-c", f"{holds}; print('held', flush=True); sys.stdin.read()", run.path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        before = tree(run.path)
        for options in (["--keep-last", 1], ["--damaged"], ["--keep-last", 1, "--dry-run"]):
            done = checkpoints("prune", run.path, *options)
            assert isinstance(done.exception, CannotDo)
            assert "another process is writing to" in str(done.exception)
        assert tree(run.path) == before
        assert checkpoints("list", run.path).exit_code == 0
        process.communicate()
    assert checkpoints("prune", run.path, "--keep-last", 1).exit_code == 0


class Killed(BaseException):
    """As if the process ended here."""


def test_death_while_deleting_leaves_whole_checkpoints_and_the_event(run, monkeypatch):
    def die(folder: Any, names: Any) -> None:
        if inventory.REMOVED in names:
            shutil.rmtree(folder / inventory.REMOVED / "10" / "state")
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(inventory, "remove", die)
        with pytest.raises(Killed):
            upkeep.prune(run, upkeep.Wish(keep_last=1))
    (event,) = pruned_events(run)
    assert event["steps"] == [10, 30, 40]
    said = answer("verify", run.path)
    assert [c["step"] for c in said["checkpoints"]] == [20, 50, 28]
    assert answer("list", run.path)["segments"][0]["leftovers"][0]["name"] == "removed"
    answer("prune", run.path, "--keep-last", 1)
    assert steps_of(run) == [20, 50]


def test_disk_that_lets_one_of_two_go_is_told_of_and_the_logbook_has_that_one(run, monkeypatch):
    set_aside = inventory.set_aside

    def refuse(folder: Any, step: int) -> None:
        if step == 30:
            raise OSError(30, "Read-only file system")
        set_aside(folder, step)

    monkeypatch.setattr(inventory, "set_aside", refuse)
    done = checkpoints("prune", run.path, "--keep-last", 1)
    assert isinstance(done.exception, CannotDo)
    assert "Read-only file system" in str(done.exception)
    (event,) = pruned_events(run)
    assert event["steps"] == [10]


def test_the_chronicle_tells_what_was_removed(run):
    flip(run, 50)
    answer("prune", run.path, "--keep-last", 1, "--damaged")
    size = pruned_events(run)[0]["bytes"]
    told = chronicle.render(run.path)
    assert ": checkpoints of segment 0 removed\n\n- Steps: 10, 30, 50.\n" in told
    assert "- Damaged were: 50.\n- The newest state left is that of step 40.\n" in told
    assert f"- Freed: {size:,} bytes.\n" in told


# --- wrong input ---


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("verify", "--step", 7), "--step 7: .* there are: 10, 20, 28, 30, 40, 50"),
        (("verify", "--step", 28, "--segment", 0), "--step 28: segment 0 of .* 10, 20, 30, 40, 50"),
        (("verify", "--segment", 3), "--segment 3: .* there are: 0"),
        (("prune", "--keep-last", 1, "--segment", 3), "--segment 3: .* there are: 0"),
        (("prune",), "give --keep-last N, --damaged or both"),
        (("prune", "--keep-every", 5), "--keep-every 5 alone"),
    ],
)
def test_wrong_questions_are_refused_by_option(run, arguments, said):
    command, *options = arguments
    before = tree(run.path)
    done = checkpoints(command, run.path, *options)
    assert isinstance(done.exception, WrongInput)
    with pytest.raises(WrongInput, match=said):
        raise done.exception
    assert tree(run.path) == before


@pytest.mark.parametrize("option", [("--keep-last", 0), ("--keep-every", 0), ("--segment", -1)])
def test_numbers_out_of_range_are_usage_errors(run, option):
    assert checkpoints("prune", run.path, "--keep-last", 1, *option).exit_code == 2


@pytest.mark.parametrize("command", ["list", "verify", "prune"])
def test_what_is_no_run_is_refused(tmp_path, command):
    done = checkpoints(command, tmp_path)
    assert isinstance(done.exception, WrongInput)
    assert "is not a run's folder" in str(done.exception)
