"""A run's folder from somebody else: read, or refused by name; and nothing outside is written."""

from __future__ import annotations

import functools
import json
import pathlib
import shutil
from collections.abc import Callable, Sequence
from typing import Any

import hypothesis
import hypothesis.strategies as st
import mutations
import pytest
import runs_of_others
from corpus import corpora
from report import books

from palm_jax import config, report
from palm_jax.diagnosis.arms import Plan
from palm_jax.diagnosis.casefile import CaseFile
from palm_jax.diagnosis.diagnose import locate
from palm_jax.errors import CannotDo, WrongInput
from palm_jax.record import chronicle, folder, lock, logbook, segments
from palm_jax.record.folder import RunFolder
from palm_jax.record.mirror import bring_back
from palm_jax.record.segments import Departure, Segment
from palm_jax.replay import branches, replay
from palm_jax.report import page
from palm_jax.spikes import history


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> pathlib.Path:
    return runs_of_others.made(tmp_path_factory.mktemp("hostile") / "run")


@pytest.fixture
def copied(run, tmp_path) -> pathlib.Path:
    return shutil.copytree(run, tmp_path / "run")


@pytest.fixture(autouse=True)
def without_plotly(monkeypatch):
    """Its script, five megabytes of every page, is not what is looked at here."""
    monkeypatch.setattr(page.plotly.offline, "get_plotlyjs", lambda: "")


def rendered(run: pathlib.Path) -> None:
    reading = report.read(run)
    page.render(report.content(reading, report.headline(reading))).encode()


def found_again(run: pathlib.Path) -> None:
    there = RunFolder(run)
    settings = there.config().spikes
    history.detector(there, settings)
    history.candidates(there, settings, [0, 10, 20, 40])
    history.rollbacks(there)
    history.told(there)
    locate(there, settings, None, None)


def told_of_branches(run: pathlib.Path) -> None:
    there = RunFolder(run)
    for name in branches.names(there):
        branches.describe(branches.branch_of(there, name))
        branches.losses_beside(there, branches.branch_of(there, name))


def relied_on(run: pathlib.Path) -> None:
    """What a replay, a resume and a diagnosis take from the record."""
    there = RunFolder(run)
    logbook.History.read(run).first_attempt(0, 3)
    logbook.skip_limits(run, 0)
    replay.recorded(there, 0, 0, 10, None)
    base = there.config()
    for number in range(there.last_segment() + 1):
        described = segments.read(there.segment(number))
        for step in (described.start_step, described.start_step + 10):
            described.settings_at(base, step)
            assert described.data_step(step) >= 0
            branches.positions_of(base, described, step, step + 1)


def judged(run: pathlib.Path) -> None:
    case = CaseFile.of(RunFolder(run), 0, runs_of_others.ONSET)
    plan = case.plan()
    if plan is not None:
        case.results(plan)
        for arm in plan.arms:
            assert case._result(arm).parent == case.path / "arms"
    case.forensics()


Reader = Callable[[pathlib.Path], Any]
READERS: tuple[Reader, ...] = (
    *(rendered, found_again, told_of_branches, relied_on, judged),
    *(chronicle.render, chronicle.summary),
)


@st.composite
def changes(draw: st.DrawFn, run: pathlib.Path) -> tuple[str, bytes]:
    name = draw(st.sampled_from(runs_of_others.FILES))
    return name, draw(mutations.files((run / name).read_text(), name))


def check(
    run: pathlib.Path, name: str, content: bytes | str, readers: Sequence[Reader] = READERS
) -> None:
    before = {path for path in run.parent.rglob("*") if path.name != "kept"}
    with mutations.damaged(run, name, content):
        for reader in readers:
            mutations.answered(functools.partial(reader, run), run, "segment ")
    assert {path for path in run.parent.rglob("*") if path.name != "kept"} == before


@mutations.QUICK
@hypothesis.given(st.data())
def test_any_damage_is_read_or_refused_by_name(run, data):
    check(run, *data.draw(changes(run)))


@pytest.mark.slow
@mutations.THOROUGH
@hypothesis.given(st.data())
def test_much_damage_is_read_or_refused_by_name(run, data):
    check(run, *data.draw(changes(run)))


@pytest.mark.parametrize("name", runs_of_others.FILES)
def test_what_is_no_file_is_refused_and_not_waited_for(run, name):
    check(run, name, "fifo")


@pytest.mark.slow
@pytest.mark.parametrize("name", runs_of_others.FILES)
def test_nor_is_anything_else(run, name):
    for kind in mutations.KINDS:
        check(run, name, kind)


COMPUTED = st.dictionaries(
    st.sampled_from(
        [
            *("loss", "gradient_norm", "batch_size", "applied", "clip_factor", "clip_norm"),
            *("loss_scale", "mean_log_z", "max_attention_logit", "tokens", "first_position"),
            *("layers/max_attention_logit", "layers/residual_rms", "layers/x", "skip_above"),
        ]
    ),
    mutations.ODD | st.floats(width=16).filter(lambda x: x == x and abs(x) < 1e9),
    max_size=6,
)


@mutations.QUICK
@hypothesis.given(st.lists(COMPUTED, min_size=1, max_size=60), st.integers(1, 30))
def test_steps_of_any_numbers_are_read_or_refused_by_name(run, computed, times):
    lines = [
        books.step(number, **{"gradient_norm": 1.0} | computed[number % len(computed)])
        for number in range(min(200, times * len(computed)))
    ]
    content = "".join(f"{json.dumps(line)}\n" for line in lines)
    check(run, "logbook/0000.jsonl", content.encode(), (rendered, found_again, chronicle.render))


@pytest.mark.parametrize(
    "line",
    [
        '{"event":"step","segment":0,"attempt":1,"step":-1,"computed":{},"bits":{}}',
        '{"event":"step","segment":0,"attempt":1,"step":1e3,"computed":{},"bits":{}}',
        '{"event":"step","segment":true,"attempt":1,"step":1,"computed":{},"bits":{}}',
        f'{{"event":"step","segment":0,"attempt":1,"step":{2**63},"computed":{{}},"bits":{{}}}}',
        f'{{"event":"x","y":{"[" * 60}{"]" * 60}}}',
        f'{{"event":"x","y":{"[" * 100_000}',
        f'{{"event":"x","y":{"9" * 5000}}}',
    ],
)
def test_a_line_that_is_no_record_is_refused_by_number(copied, line):
    path = copied / "logbook" / "0000.jsonl"
    path.write_text(f"{line}\n{path.read_text()}")
    with pytest.raises(CannotDo, match=r"0000\.jsonl, line 1 is not a record"):
        logbook.read(copied)


def described(copied: pathlib.Path, number: int, **changes: object) -> RunFolder:
    path = copied / "segments" / f"{number:03d}" / "segment.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return RunFolder(copied)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"parent": {"segment": 1, "step": 20}}, "not an earlier one"),
        ({"parent": {"segment": 9, "step": 20}}, "not an earlier one"),
        ({"parent": {"run": ".", "segment": 0, "step": 20}}, r"parent\.run"),
        ({"parent": {"run": "../../../etc/..", "segment": 0, "step": 2}}, r"parent\.run"),
        ({"parent": {"run": "/etc", "segment": 0, "step": 20}}, r"parent\.run"),
        ({"segment": 3}, "it says segment=3"),
        ({"data_offset": -30}, "no data before step 0"),
        ({"exclusions": [[9, 9]]}, "9:9 is empty"),
        ({"exclusions": [[0, 10**30]]}, r"exclusions\.0\.alone\.1"),
        ({"exclusions": [[0, 9, 7]]}, r"exclusions\.0\.named\.2"),
        ({"exclusions": [[9, 3, "books"]]}, "9:3 is empty"),
        ({"exclusions": [7]}, r"exclusions\.0"),
        ({"update_count": 2**40}, "update_count"),
    ],
)
def test_a_segment_that_cannot_be_is_refused(copied, changes, said):
    there = described(copied, 1, **changes)
    with pytest.raises(CannotDo, match=said):
        history.chain(there)


@pytest.mark.parametrize(
    "changed", ["log.alert_command", "data.corpus", "optimizer.name", "steps", "x", "", "spikes"]
)
def test_a_segment_changes_what_a_history_may_and_nothing_else(copied, changed):
    change = {"at": 20, "changes": {changed: "x"}, "reason": ""}
    there = described(copied, 1, interventions=[change])
    with pytest.raises(CannotDo, match="not a setting that may change"):
        segments.read(there.segment(1))


def test_a_change_of_a_setting_that_is_not_there_is_refused(copied):
    changes = {"optimizer.beta1.x": 1}
    there = described(copied, 1, interventions=[{"at": 0, "changes": changes, "reason": ""}])
    with pytest.raises(WrongInput, match=r"segment 1 changes optimizer\.beta1\.x"):
        segments.read(there.segment(1)).settings_at(there.config(), 0)


def test_an_exclusion_of_more_than_there_is_is_told_without_listing_it(copied):
    there = described(copied, 1, exclusions=[[160, 2**50]])
    segment = segments.read(there.segment(1))
    told = branches.recurrences(there.config(), segment, {None: range(100)})
    assert told["excluded_positions"] == 2**50 - 160
    assert told["sequence_ids"] == list(range(100))
    assert len(told["epochs"]) == 1000


def test_an_exclusion_of_another_corpus_is_refused_with_its_segment(copied):
    there = described(copied, 1, exclusions=[[160, 170, "books"]])
    segment = segments.read(there.segment(1))
    with pytest.raises(WrongInput, match=r"segment 1: .*positions 160:170 of books.*one, without"):
        branches.positions_of(there.config(), segment, 3, 4)


def test_digits_of_other_scripts_number_no_segment(copied):
    (copied / "segments" / "²").mkdir()
    (copied / "segments" / ("9" * 200)).mkdir()
    (copied / "logbook" / f"{'9' * 200}.jsonl").write_text("")
    assert RunFolder(copied).last_segment() == 1
    assert len(logbook.read(copied).records) > 0


# --- a diagnosis ---


@pytest.mark.parametrize("name", ["../../../outside", "/tmp/outside", "a/b", "", "..", "A1\0"])
def test_an_arm_that_names_another_place_is_refused(copied, name):
    path = copied / runs_of_others.CASE / "plan.json"
    fields = json.loads(path.read_text())
    fields["arms"][0]["name"] = name
    path.write_text(json.dumps(fields))
    with pytest.raises(CannotDo, match=r"plan\.json is damaged: arms\.0\.name"):
        CaseFile.of(RunFolder(copied), 0, runs_of_others.ONSET).plan()


def test_every_arm_that_is_planned_can_be_written_and_read_again(copied):
    plan = runs_of_others.plan()
    assert Plan.model_validate_json(plan.model_dump_json()) == plan
    case = CaseFile.of(RunFolder(copied), 0, runs_of_others.ONSET)
    for arm in plan.arms:
        case.add(arm, runs_of_others.result(arm))
    assert case.results(plan).keys() == {arm.name for arm in plan.arms}


# --- nothing outside is written ---

LINKS = ("logbook", "segments", "segments/001", "reports", "branches", "diagnoses")


@pytest.fixture
def outside(tmp_path) -> pathlib.Path:
    place = tmp_path / "outside"
    place.mkdir()
    return place


@pytest.mark.parametrize("name", LINKS)
def test_a_link_out_of_the_run_is_not_written_through(copied, outside, name):
    there = copied / name
    if there.exists():
        shutil.copytree(there, outside, dirs_exist_ok=True)
        shutil.rmtree(there)
    there.symlink_to(outside)
    before = {path: path.is_file() and path.read_bytes() for path in outside.rglob("*")}
    run = RunFolder(copied)

    def hold() -> None:
        with lock.held(copied):
            pass

    writers = (
        lambda: chronicle.note(copied, "text"),
        lambda: report.write(copied),
        lambda: branches.create_branch(run, 8, branches.Changes()),
        lambda: CaseFile.of(run, 0, 5).begin(runs_of_others.plan()),
        hold,
    )
    for write in writers:
        with pytest.raises(CannotDo, match="is a link"):
            write()
    assert {path: path.is_file() and path.read_bytes() for path in outside.rglob("*")} == before


def test_the_runs_folder_itself_may_be_a_link(copied, tmp_path):
    (tmp_path / "link").symlink_to(copied)
    chronicle.note(tmp_path / "link", "text")
    assert "text" in chronicle.render(copied)


def test_a_file_is_replaced_and_not_what_a_link_in_its_way_leads_to(copied, outside):
    precious = outside / "file"
    precious.write_text("kept")
    (copied / ".config.yaml.new").symlink_to(precious)
    (copied / "config.yaml").unlink()
    (copied / "config.yaml").symlink_to(precious)
    folder.write_whole(copied / "config.yaml", "new")
    assert (copied / "config.yaml").read_text() == "new"
    assert not (copied / "config.yaml").is_symlink()
    assert precious.read_text() == "kept"


def test_a_checkpoint_of_links_is_not_copied(copied, outside):
    (outside / "secret").write_text("secret")
    saved = copied / "branches" / "cure" / "segments" / "000" / "checkpoints" / "12"
    saved.mkdir(parents=True)
    (saved / "state").symlink_to(outside / "secret")
    parent = Departure(segment=1, step=20)
    with pytest.raises(CannotDo, match="neither a plain file nor a folder"):
        folder.open_segment(
            RunFolder(copied), Segment(segment=2, parent=parent, start_step=20), [saved]
        )
    assert not (copied / "segments" / "002").exists()


def test_a_branch_runs_no_command_and_writes_to_no_place_that_its_run_names(copied, tmp_path):
    corpora.with_sequences(tmp_path, 4)
    shutil.copy(tmp_path / "corpus" / "manifest.json", copied)
    settings = config.load(
        copied / "config.yaml", ["log.alert_command='touch trace'", "checkpoint.mirror=/outside"]
    )
    (copied / "config.yaml").write_text(config.to_yaml(settings))
    made, _ = branches.create_branch(RunFolder(copied), 8, branches.Changes(), segment=0)
    assert config.differences(settings, made.config()) == {
        "log.alert_command": ("touch trace", None),
        "checkpoint.mirror": ("/outside", None),
    }


@pytest.mark.parametrize("kind", mutations.KINDS)
def test_an_owner_that_is_no_file_is_not_waited_for(copied, kind):
    (copied / lock.FILE_NAME).write_text("")
    mutations.replace(copied / lock.FILE_NAME, kind)

    def hold() -> None:
        with lock.held(copied):
            pass

    mutations.answered(hold, copied)


@pytest.mark.parametrize("kind", ["fifo", "endless", "loop"])
def test_a_mirror_of_other_things_than_files_is_not_copied(copied, tmp_path, kind):
    mirror = tmp_path / "mirror"
    shutil.copytree(copied, mirror)
    mutations.replace(mirror / "segments" / "001" / "segment.json", kind)
    settings = config.load(copied / "config.yaml", [f"checkpoint.mirror={mirror}"])
    with pytest.raises(CannotDo, match="neither a plain file nor a folder"):
        bring_back(settings, tmp_path / "gone")
    assert not (tmp_path / "gone").exists()
