"""Branches, interventions and promotions: one thing changes, and the rest keeps its bits."""

from __future__ import annotations

import json
import pathlib
import shutil

import jax
import numpy as np
import pytest
from runs import StopAfter

from palm_jax import config, data
from palm_jax import train as training
from palm_jax.corpus.reader import Corpus
from palm_jax.errors import WrongInput
from palm_jax.record import logbook, segments
from palm_jax.record.folder import RunFolder
from palm_jax.replay import branches
from palm_jax.replay import replay as replaying
from palm_jax.replay.branches import Changes

NOTHING = Changes()


@pytest.fixture(scope="module")
def original(small, tmp_path_factory) -> pathlib.Path:
    """Twelve ramped steps with checkpoints at 4, 8 and 12. Read only."""
    path = tmp_path_factory.mktemp("branches") / "run"
    training.train(small(), path)
    return path


@pytest.fixture
def run(original, tmp_path) -> RunFolder:
    shutil.copytree(original, tmp_path / "run")
    return RunFolder(tmp_path / "run")


def bits(run: RunFolder, segment: int | None = None) -> dict[int, dict]:
    """Bits of the last attempt of every step, in the last segment or the one asked for."""
    wanted = run.last_segment() if segment is None else segment
    return {
        record["step"]: record["bits"]
        for record in logbook.read(run.path).records
        if record["event"] == "step" and record["segment"] == wanted
    }


def branch(run: RunFolder, from_step: int, until: int, changes: Changes = NOTHING, **options):
    made, _ = branches.create_branch(run, from_step, changes, **options)
    settings = made.config().model_copy(update={"steps": until})
    outcome = training.train(settings, made.path, keep=False)
    return made, outcome


def replay(run: RunFolder, start: int, stop: int, **options):
    with Corpus.open(run.config().data.corpus) as corpus:
        return replaying.replay(run, start, stop, corpus=corpus, **options)


def content(path: pathlib.Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(path)): p.read_bytes()
        for p in path.rglob("*")
        if p.is_file() and "branches" not in p.parts
    }


@pytest.mark.parametrize("from_step", [4, 6])
def test_branch_that_changes_nothing_is_the_run_itself(run, from_step):
    before = content(run.path)
    made, outcome = branch(run, from_step, 12)
    original_bits = bits(run)
    assert bits(made) == {step: original_bits[step] for step in range(from_step, 12)}
    stop = [r for r in logbook.read(run.path).records if r["event"] == "stop"][-1]
    assert outcome.state_digest == stop["state_digest"]
    assert content(run.path) == before  # the run itself was only read


@pytest.mark.slow
def test_branch_replays_too(run):
    made, _ = branch(run, 6, 10, Changes(overrides=("schedule.peak=0.02",)))
    assert replay(made, 7, 10).identical


def test_changed_setting_is_in_force_from_the_departure_on(run):
    made, _ = branch(run, 6, 10, Changes(overrides=("schedule.peak=0.02", "optimizer.beta1=0.5")))
    records = [r for r in logbook.read(made.path).records if r["event"] == "step"]
    assert [r["computed"]["rate"] for r in records] == [float(np.float32(0.02))] * 4
    assert [r["computed"]["beta1"] for r in records] == [0.5] * 4
    theirs, ours = bits(run), bits(made)
    assert ours[6]["loss"] == theirs[6]["loss"]  # the state it departs with is the same
    assert ours[7]["loss"] != theirs[7]["loss"]


DECAY = (
    "schedule.kind=wsd",
    "schedule.peak=0.01",
    "schedule.hold_steps=6",
    "schedule.decay_steps=10",
    "schedule.final=0.001",
    "schedule.decay=linear",
)


def test_another_schedule_is_in_force_from_the_departure_on(small):
    changed = segments.changes_of(small(), list(DECAY), segments.IN_MID_RUN)
    change = segments.Intervention(
        at=6, changes={key: new for key, (_, new) in changed.items()}, reason="decay"
    )
    back = segments.Intervention(
        at=9,
        changes={"schedule.kind": "constant", "schedule.hold_steps": None, "schedule.decay": None}
        | dict.fromkeys(("schedule.final", "schedule.decay_steps")),
        reason="hold",
    )
    segment = segments.Segment(interventions=(change, back))
    assert segment.settings_at(small(), 5) == small()
    assert segment.settings_at(small(), 6) == config.override(small(), DECAY)
    assert segment.settings_at(small(), 9).schedule == config.ConstantSchedule(
        kind="constant", peak=0.01
    )


@pytest.mark.slow
def test_a_decay_forks_from_the_stable_part_of_a_run(run):
    made, _ = branch(run, 6, 10, Changes(overrides=DECAY))
    records = [r for r in logbook.read(made.path).records if r["event"] == "step"]
    rates = [r["computed"]["rate"] for r in records]
    assert rates == pytest.approx([0.00775, 0.0055, 0.00325, 0.001], rel=1e-6)
    assert rates[-1] == float(np.float32(0.001))
    assert replay(made, 7, 10).identical


@pytest.mark.slow
def test_branch_is_fed_the_data_of_other_steps(run):
    made, _ = branch(run, 4, 8, Changes(data_from=7))
    theirs, ours = bits(run), bits(made)
    for step in range(4, 8):
        assert ours[step]["batch_digest"] == theirs[step + 3]["batch_digest"]
        assert ours[step]["batch_size"] == 16  # the data position carries its batch size
        assert ours[step]["rate"] == theirs[step]["rate"]


@pytest.mark.slow
def test_clocks_of_schedule_and_moments_are_set_apart(small, tmp_path):
    settings = small(**{"schedule.hold_steps": 1})
    training.train(settings, tmp_path / "run")
    run = RunFolder(tmp_path / "run")
    made, _ = branch(run, 8, 11, Changes(schedule_step=2, update_count=5))
    theirs, ours = bits(run), bits(made)
    for step in range(8, 11):
        assert ours[step]["rate"] == theirs[step - 6]["rate"]
        assert ours[step]["beta2"] == theirs[step - 3]["beta2"]
        assert ours[step]["batch_digest"] == theirs[step]["batch_digest"]


def test_excluded_steps_are_never_read_and_nothing_else_is_lost(run, small):
    made, _ = branch(run, 4, 10, Changes(exclude=((6, 8),)))
    settings = small()

    def ids(folder, index):
        (record,) = [
            r
            for r in logbook.read(folder.path).records
            if r["event"] == "step" and r["step"] == index
        ]
        return record["computed"]["first_position"], record["computed"]["batch_digest"]

    assert ids(made, 5) == ids(run, 5)
    # Steps 6 and 7 of the branch read what 8 and 9 of the run read.
    assert [ids(made, s) for s in (6, 7)] == [ids(run, s) for s in (8, 9)]
    segment = segments.read(made.segment(0))
    assert segment.exclusions == ((56, 88),)
    (first, last), *_ = segment.exclusions
    read = [position for s in range(6) for _, position in segment.stream_of(settings).places(s + 4)]
    assert not set(read) & set(range(first, last))


@pytest.mark.slow
def test_two_branches_in_one_process_do_not_disturb_each_other(run):
    _, hot_alone = branch(run, 4, 8, Changes(overrides=("schedule.peak=0.5",)))
    one, _ = branches.create_branch(run, 4, Changes(overrides=("schedule.peak=0.5",)), name="one")
    two, _ = branches.create_branch(run, 4, Changes(), name="two")

    def until(folder, stop):
        return training.train(
            folder.config().model_copy(update={"steps": stop}), folder.path, keep=False
        )

    until(one, 6)
    calm = until(two, 8)
    hot = until(one, 8)
    assert hot.state_digest == hot_alone.state_digest
    saved = {r["step"]: r for r in logbook.read(run.path).records if r["event"] == "checkpoint"}
    assert calm.state_digest == saved[8]["state_digest"]


@pytest.mark.slow
def test_branch_on_another_mesh_has_the_same_bits(run):
    made, _ = branch(run, 6, 8, mesh=config.Mesh(fsdp=2))
    theirs = bits(run)
    assert bits(made) == {step: theirs[step] for step in (6, 7)}


# --- interventions ---


def test_intervention_is_in_force_at_its_step_and_replays(run, small):
    branches.intervene(
        run, 9, Changes(overrides=("optimizer.beta1=0.5", "optimizer.clip_norm=0.1")), "norm drifts"
    )
    outcome = training.train(small(), run.path)
    assert outcome.step == 12
    before, after = bits(run, 0), bits(run, 1)
    assert sorted(after) == [8, 9, 10, 11]  # from the newest checkpoint on
    assert after[8] == before[8]
    records = {
        r["step"]: r["computed"]
        for r in logbook.read(run.path).records
        if r["event"] == "step" and r["segment"] == 1
    }
    # What the step itself says was in force, not what the config says.
    assert [records[s]["beta1"] for s in range(8, 12)] == [float(np.float32(0.9)), 0.5, 0.5, 0.5]
    assert [records[s]["clip_norm"] for s in range(8, 12)] == [1.0] + [float(np.float32(0.1))] * 3
    assert replay(run, 8, 12).identical
    assert replay(run, 8, 12, segment=0).identical


@pytest.mark.slow
def test_changed_beta_acts_although_momentum_was_saved_with_another(small, tmp_path):
    """A rule rebuilt with saved numbers would ignore the change, as once happened to OPT."""
    settings = small(
        **{
            "schedule.peak": 0.1,
            "optimizer.clip_norm": None,
            "optimizer.update_clip": None,
            "optimizer.weight_decay_exponent": None,
        }
    )
    training.train(settings, tmp_path / "run", stop_requested=StopAfter(3))
    run = RunFolder(tmp_path / "run")
    branches.intervene(run, 4, Changes(overrides=("optimizer.beta1=0.0",)), "no momentum")
    training.train(settings, run.path, stop_requested=StopAfter(0))
    folder = run.checkpoints(1) / "5"
    before, after = state_of(run.checkpoints(0), 4), state_of(run.checkpoints(1), 5)
    assert folder.is_dir()
    # With beta1 = 0 the parameter moves by exactly the new momentum, which holds no old part.
    moved = before["params/layers/w_gate_DF"] - after["params/layers/w_gate_DF"]
    momentum = after["optimizer/momentum/ema/layers/w_gate_DF"]
    np.testing.assert_allclose(moved, momentum, atol=1e-7)
    old = before["optimizer/momentum/ema/layers/w_gate_DF"]
    assert np.abs(momentum - (0.9 * old + 0.1 * momentum)).max() > 1e-4


def state_of(folder: pathlib.Path, step: int) -> dict[str, np.ndarray]:
    from palm_jax.record import digests
    from palm_jax.record.checkpoints import Checkpoints

    with Checkpoints(folder, config.Checkpoint()) as saved:
        record = saved.record(step)
        like = {}
        for path, text in record["leaves"].items():
            dtype, _, shape = text.partition("[")
            dims = tuple(int(d) for d in shape[:-1].split(",") if d)
            like[path] = jax.ShapeDtypeStruct(
                dims, dtype, sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0])
            )
        nested: dict = {}
        for path, leaf in like.items():
            place = nested
            *parents, last = path.split("/")
            for parent in parents:
                place = place.setdefault(parent, {})
            place[last] = leaf
        state, _ = saved.restore(step, nested)
    return {path: np.asarray(leaf) for path, leaf in digests.named_leaves(state).items()}


@pytest.mark.slow
def test_intervention_ahead_loses_no_checkpoint(run, small):
    branches.intervene(run, 13, Changes(overrides=("schedule.peak=0.001",)), "cool down")
    segment = segments.read(run.segment(1))
    assert segment.start_step == 12
    training.train(small(steps=14), run.path)
    assert sorted(bits(run, 1)) == [12, 13]


@pytest.mark.slow
def test_later_intervention_keeps_the_earlier_one(run, small):
    branches.intervene(run, 8, Changes(overrides=("schedule.peak=0.02",)), "first")
    branches.intervene(run, 10, Changes(overrides=("optimizer.beta1=0.5",)), "second")
    settings = segments.read(run.segment(2)).settings_at(small(), 11)
    assert (settings.schedule.peak, settings.optimizer.beta1) == (0.02, 0.5)
    training.train(small(), run.path)
    assert replay(run, 9, 12).identical


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["model.width=32"], "model.width cannot change"),
        (["optimizer.name=adamw"], "optimizer.name cannot change"),
        (["optimizer.factored=true"], "optimizer.factored cannot change"),
        (["schedule.kind=cosine"], "schedule.decay_steps is missing"),
        (["optimizer.beta3=1"], "no setting optimizer.beta3"),
        (["numerics.lanes=4"], "numerics.lanes cannot change"),
        ([], "nothing would change"),
    ],
)
def test_what_cannot_change_in_mid_run_is_refused(run, overrides, said):
    with pytest.raises(WrongInput, match=said):
        branches.intervene(run, 9, Changes(overrides=tuple(overrides)), "why not")
    assert run.last_segment() == 0


def test_intervention_without_a_reason_is_refused(run):
    with pytest.raises(WrongInput, match="--reason is empty"):
        branches.intervene(run, 9, Changes(overrides=("schedule.peak=0.02",)), " ")


# --- exclusions and rollback ---


# Before, at and after a checkpoint's step.
@pytest.mark.parametrize("at", [8, *(pytest.param(at, marks=pytest.mark.slow) for at in (5, 10))])
def test_run_with_an_exclusion_trains_and_replays_and_so_does_its_past(run, small, at):
    branches.intervene(run, at, Changes(exclude=((at, at + 2),)), "garbage")
    training.train(small(), run.path)
    new, old = bits(run, 1), bits(run, 0)
    assert new[at]["batch_digest"] != old[at]["batch_digest"]
    if at + 2 < 12:
        assert new[at]["batch_digest"] == old[at + 2]["batch_digest"]
    assert replay(run, min(new), 12).identical
    assert replay(run, 0, 12, segment=0).identical


@pytest.mark.slow
def test_second_exclusion_composes_with_the_first(run, small):
    branches.intervene(run, 8, Changes(exclude=((9, 10),)), "first")
    training.train(small(), run.path)
    branches.intervene(run, 10, Changes(exclude=((10, 11),)), "second")
    training.train(small(), run.path)
    segment = segments.read(run.segment(2))
    # Step 9 was excluded, so step 10 of that history read what was step 11's.
    assert segment.exclusions == ((104, 120), (136, 152))
    assert replay(run, 9, 12).identical


def test_exclusion_of_data_that_was_read_already_is_refused(run):
    with pytest.raises(WrongInput, match="begins before step 9"):
        branches.intervene(run, 9, Changes(exclude=((7, 9),)), "too late")


def test_recurring_sequences_are_listed(small):
    settings = small(steps=100)
    segment = segments.Segment(exclusions=((3, 6),))
    found = branches.recurrences(settings, segment, id_ranges={None: range(500)})
    ids = data.sequence_ids(settings.seed, range(3, 6), 500)
    assert found["sequence_ids"] == sorted(ids.tolist())
    # 5 x 8 + 95 x 16 = 1560 sequences and 3 that were left out: positions up to 1562.
    assert found["epochs"] == [1, 2, 3]


# --- promotion ---


@pytest.mark.parametrize("keep", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_promoted_branch_becomes_the_runs_future(run, small, keep):
    made, _ = branches.create_branch(
        run, 6, Changes(overrides=("schedule.peak=0.02",)), name="cool"
    )
    settings = made.config().model_copy(update={"steps": 10})
    training.train(settings, made.path, keep=keep)
    branches.promote(run, "cool", "it heals")
    training.train(small(), run.path)
    new, in_branch = bits(run, 1), bits(made)
    assert sorted(new) == list(range(6, 12))
    assert {step: new[step] for step in range(6, 10)} == in_branch
    attempts = {
        r["step"]: r["attempt"]
        for r in logbook.read(run.path).records
        if r["event"] == "step" and r["segment"] == 1
    }
    assert set(attempts.values()) == {1}
    assert replay(run, 6, 12).identical
    assert replay(run, 6, 12, segment=0).identical  # the old future stays readable


def test_branches_are_listed_with_what_they_changed(run):
    made, _ = branch(run, 6, 8, Changes(overrides=("schedule.peak=0.02",)), name="cool", reason="r")
    assert branches.names(run) == ["cool"]
    described = branches.describe(made)
    assert described["changes"] == {"schedule.peak": 0.02}
    assert (described["from_step"], described["steps_made"], described["reason"]) == (6, 2, "r")
    beside = branches.losses_beside(run, made)
    assert [step for step, _, _ in beside] == [6, 7]
    assert beside[0][1] == beside[0][2]
    with pytest.raises(WrongInput, match="a branch cool"):
        branches.create_branch(run, 6, Changes(), name="cool")
    with pytest.raises(WrongInput, match="no branch 'hot'; there are: cool"):
        branches.branch_of(run, "hot")


def test_segment_description_is_strict(run):
    path = run.segment(0) / "segment.json"
    description = json.loads(path.read_text())
    path.write_text(json.dumps(description | {"surprise": 1}))
    with pytest.raises(Exception, match="is damaged"):
        segments.read(run.segment(0))
