"""Real training processes that are lost, do not agree, or are stopped, and what the others do."""

from __future__ import annotations

import pathlib
import re
import shutil
import signal
import sys
import time

import pytest

from palm_jax.record import logbook

SCRIPTS = pathlib.Path(__file__).parents[2] / "scripts" / "faulting"
sys.path.insert(0, str(SCRIPTS))

from trial import STEPS, Place, wait_for  # noqa: E402

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place = Place(tmp_path_factory.mktemp("faults"))
    place.prepare()
    return place


@pytest.fixture(scope="module")
def straight(place):
    """The state digest of a run that nothing happened to."""
    (member,) = place.start("straight")
    code, said = member.end()
    assert code == 0, member.text()
    return said["state_digest"]


def steps_of(run):
    return {r["step"]: r for r in logbook.read(run).records if r["event"] == "step"}


def test_killed_process_is_named_and_one_process_goes_on_with_the_same_bits(place, straight):
    members = place.start("killed", 2)
    assert wait_for(lambda: members[0].step >= 12, members[0])
    members[1].send(signal.SIGKILL)
    codes = [member.end()[0] for member in members]
    assert codes == [6, 137], members[0].text()
    assert "error: no sign of life from process 1" in members[0].text()
    (alone,) = place.start("killed")
    code, said = alone.end()
    assert code == 0, alone.text()
    assert said["state_digest"] == straight
    before, after = steps_of(place.folder / "straight"), steps_of(place.folder / "killed")
    assert [after[s]["bits"] for s in range(STEPS)] == [before[s]["bits"] for s in range(STEPS)]
    # What two processes did, replayed by one.
    (again,) = place.start("killed", command=["replay", "killed", "--steps", "3:9"])
    code, said = again.end()
    assert (code, said["identical"]) == (0, True), again.text()


def test_process_that_fails_says_why_and_the_other_says_which_it_was(place, straight):
    run = place.folder / "damaged"
    shutil.copytree(place.folder / "straight", run)
    for path in run.glob("segments/000/checkpoints/40/state/**/d/*"):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    members = place.start("damaged", 2)
    ends = sorted((member.end()[0], member.text()) for member in members)
    assert ends[0][0] == 3, ends
    # Who has found the damage by itself before it hears of the other says so.
    of_others = r"error: process [01] \(.*\) has ended: CannotDo: checkpoint 40"
    for code, text in ends:
        assert re.search({3: "error: checkpoint 40", 6: of_others}[code], text), ends


def test_paused_process_ends_the_other_and_then_itself(place):
    members = place.start("paused", 2)
    assert wait_for(lambda: members[0].step >= 7, members[0])
    members[0].send(signal.SIGSTOP)
    assert members[1].end()[0] == 6
    assert "no sign of life from process 0" in members[1].text()
    members[0].send(signal.SIGCONT)
    assert members[0].end()[0] != 0


def test_signal_to_one_process_stops_both_at_one_step(place):
    members = place.start("stopped", 2)
    assert wait_for(lambda: members[0].step >= 3, members[0])
    members[1].send(signal.SIGTERM)
    ends = [member.end() for member in members]
    assert [code for code, _ in ends] == [4, 4], members[0].text()
    assert ends[0][1]["step"] == ends[1][1]["step"] < STEPS
    assert ends[0][1]["state_digest"] == ends[1][1]["state_digest"]


def test_process_that_does_not_start_is_named(place):
    members = place.start("missing", 2, "distributed.start_timeout_s=8")
    members[1].kill()
    assert members[0].end()[0] == 6
    assert "process 1 did not start within distributed.start_timeout_s=8" in members[0].text()
    assert not (place.folder / "missing").exists()


def test_processes_that_were_given_different_settings_say_which(place):
    members = place.start("unlike", 2, only_second=["schedule.peak=0.02"])
    codes = [member.end()[0] for member in members]
    assert codes == [2, 2], members[0].text()
    for member in members:
        assert "schedule.peak is 0.02 there and 0.01 in process 0" in member.text()
    assert not (place.folder / "unlike").exists()


def test_supervised_run_is_done_whatever_kills_it(place, straight):
    (member,) = place.start("supervised", 1, supervised=True)
    for step in (8, 20):
        assert wait_for(lambda step=step: member.step >= step, member)
        member.send(signal.SIGKILL)
        time.sleep(0.3)
    code, said = member.end()
    assert code == 0, member.text()
    assert said["state_digest"] == straight
    events = logbook.read(place.folder / "supervised").records
    causes = [r["cause"] for r in events if r["event"] == "restart"]
    assert causes == ["it was killed by SIGKILL"] * 2
