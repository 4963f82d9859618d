from __future__ import annotations

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest
from runs import StopAfter

from palm_jax import config, data, sharding, step, stream
from palm_jax import train as training
from palm_jax.corpus import planted
from palm_jax.corpus.reader import Corpus
from palm_jax.errors import WrongInput
from palm_jax.record import logbook, segments
from palm_jax.record.checkpoints import Checkpoints
from palm_jax.record.folder import RunFolder
from palm_jax.replay.replay import replay

STEPS, GARBAGE = 64, (40, 52)  # steps that the garbage is planted in
SPIKES = {
    "window": 20,
    "min_history": 12,
    "patience_steps": 8,
    "nonfinite_steps": 3,
    "rewind_steps": 6,
    "exclude_batches": 20,
    "same_place_steps": 30,
}


@pytest.fixture(scope="module")
def watched(small, corpus_folder, tmp_path_factory):
    """Builds configs of a run over garbage, or with garbage=False over the text alone."""
    folder = tmp_path_factory.mktemp("planted") / "corpus"
    base = _settings(small, corpus_folder, "observe")
    ramp = base.data.ramp
    positions = range(*(stream.sequences_before(ramp, s) for s in GARBAGE))
    with Corpus.open(corpus_folder) as corpus:
        ids = data.sequence_ids(base.seed, list(positions), corpus.num_sequences("train"))
    planted.plant(corpus_folder, folder, ids)

    def build(policy: str, garbage: bool = True, **more) -> config.Config:
        return _settings(small, folder if garbage else corpus_folder, policy, **more)

    return build


def _settings(small, corpus, policy, **more):
    spikes = {f"spikes.{key}": value for key, value in SPIKES.items()}
    return small(
        steps=STEPS,
        **{
            "data.corpus": str(corpus),
            "data.ramp": {"starts": [0, 44], "sizes": [8, 16]},  # in the midst of the garbage
            "schedule.peak": 0.03,
            "checkpoint.every": 5,
            "spikes.policy": policy,
            **spikes,
            **more,
        },
    )


def events(run, name):
    return [record for record in logbook.read(run).records if record["event"] == name]


def computed(run, segment):
    return {r["step"]: r["computed"] for r in events(run, "step") if r["segment"] == segment}


@pytest.fixture(scope="module")
def rolled_back(watched, tmp_path_factory):
    """A run that was rolled back from the garbage, and its outcome. Read only."""
    run = tmp_path_factory.mktemp("rolled") / "run"
    told = []
    outcome = training.train(
        watched("rollback"), run, tell=lambda event, fields: told.append((event, fields))
    )
    return run, outcome, told


# --- planted garbage ---


def test_planting_changes_the_chosen_sequences_and_no_others(corpus_folder, tmp_path):
    described = planted.plant(corpus_folder, tmp_path / "planted", [3, 7], seed=1)
    with Corpus.open(corpus_folder) as before, Corpus.open(tmp_path / "planted") as after:
        num_sequences = before.num_sequences("train")
        old, new = (c.read("train", range(num_sequences)) for c in (before, after))
        held_out = range(before.num_sequences("held_out"))
        assert (before.read("held_out", held_out) == after.read("held_out", held_out)).all()
        after.verify()
    differing = np.flatnonzero((old != new).any(axis=1))
    assert differing.tolist() == [3, 7]
    assert described.digest != before.manifest.digest
    with pytest.raises(WrongInput, match="exists"):
        planted.plant(corpus_folder, tmp_path / "planted", [3])


# --- rollback ---


def test_rollback_leaves_the_garbage_out_and_ends_near_the_clean_run(
    watched, rolled_back, tmp_path
):
    run, outcome, told = rolled_back
    clean = training.train(watched("observe", garbage=False), tmp_path / "clean")
    observed = training.train(watched("observe"), tmp_path / "observed")
    assert outcome.gave_up is None
    assert outcome.step == STEPS
    assert not events(tmp_path / "clean", "incident")
    assert events(tmp_path / "observed", "decision")[0]["action"] == "none"
    assert observed.evaluation.loss > 1.03 * clean.evaluation.loss
    assert outcome.evaluation.loss < 1.02 * clean.evaluation.loss

    (decision,) = [e for e in events(run, "decision") if e["action"] == "rollback"]
    first, stop = GARBAGE
    assert decision["incident"][1] == first
    assert decision["checkpoint"] <= first - SPIKES["rewind_steps"]
    assert decision["exclude"][0] <= first
    assert decision["exclude"][1] >= stop
    assert "without the batches of steps" in decision["reason"]
    assert [event for event, _ in told if event in ("incident", "decision")] == [
        "incident",
        "decision",
    ]

    folder = RunFolder(run)
    opened = segments.read(folder.segment(1))
    assert folder.last_segment() == 1
    assert opened.start_step == decision["checkpoint"]
    assert opened.reason == decision["reason"]
    ramp = watched("observe").data.ramp
    ((start, end),) = opened.exclusions
    assert start <= stream.sequences_before(ramp, first)
    assert end >= stream.sequences_before(ramp, stop)


@pytest.mark.slow
def test_whole_history_replays_on_another_device_count(watched, rolled_back):
    run, _, _ = rolled_back
    mesh = config.Mesh(data=2, fsdp=2)
    with Corpus.open(watched("observe").data.corpus) as corpus:
        for segment in (0, 1):
            steps = sorted(computed(run, segment))
            found = replay(
                RunFolder(run),
                steps[0],
                steps[-1] + 1,
                corpus=corpus,
                segment=segment,
                mesh=mesh,
                allow_environment=True,
            )
            assert found.identical, found.first_difference
            assert found.compared_steps == len(steps)


@pytest.mark.slow
def test_killed_at_any_time_a_rollback_ends_with_the_same_bits(watched, rolled_back, tmp_path):
    run, outcome, _ = rolled_back
    settings = watched("rollback")
    incident = events(run, "incident")[0]["step"]
    for last in (incident - 2, 2, 6, 100):
        stopped = training.train(settings, tmp_path / "run", stop_requested=StopAfter(last))
    assert stopped.state_digest == outcome.state_digest
    assert computed(tmp_path / "run", 1) == computed(run, 1)
    assert [e["incident"] for e in events(tmp_path / "run", "decision")] == [
        e["incident"] for e in events(run, "decision")
    ]


def test_a_decision_without_its_segment_is_made_again(watched, rolled_back, tmp_path):
    run, outcome, _ = rolled_back
    again = tmp_path / "run"
    shutil.copytree(run, again)
    # As if the process had died between the decision and the opening of the segment.
    shutil.rmtree(RunFolder(again).segment(1))
    parts = sorted((again / "logbook").glob("*.jsonl"))
    for part in parts[1:]:
        part.unlink()
    lines = parts[0].read_text().splitlines(keepends=True)
    decided = next(i for i, line in enumerate(lines) if json.loads(line)["event"] == "decision")
    parts[0].write_text("".join(lines[: decided + 1]))
    assert training.train(watched("rollback"), again).state_digest == outcome.state_digest
    assert len(events(again, "decision")) == 2
    assert RunFolder(again).last_segment() == 1


def test_run_gives_up_where_no_checkpoint_is_old_enough(watched, tmp_path):
    settings = watched(
        "rollback", **{"checkpoint.every": 60, "spikes.rewind_steps": 4, "spikes.jump": 0.9}
    )
    outcome = training.train(settings, tmp_path / "run")
    assert outcome.step < STEPS
    assert "no checkpoint from step 0 to 40 is left" in outcome.gave_up
    assert events(tmp_path / "run", "decision")[-1]["action"] == "stop"
    assert events(tmp_path / "run", "stop")[-1]["signal"] == "stop"


@pytest.mark.slow
def test_experiments_are_not_saved_from_what_they_show(watched, tmp_path):
    outcome = training.train(watched("rollback"), tmp_path / "run", keep=False)
    assert outcome.step == STEPS
    assert RunFolder(tmp_path / "run").last_segment() == 0
    assert events(tmp_path / "run", "incident")


# --- what an incident needs is kept ---


@pytest.mark.slow
def test_checkpoints_that_an_incident_needs_outlive_the_keeping_policy(watched, tmp_path):
    settings = watched("observe", **{"checkpoint.keep_last": 4, "checkpoint.keep_best": 0})
    training.train(settings, tmp_path / "run")
    kept = {int(p.name) for p in RunFolder(tmp_path / "run").checkpoints(0).iterdir()}
    # 40 is the newest before the onset; the others were there when it was seen.
    assert {25, 30, 35, 40} <= kept
    assert kept - {20, 25, 30, 35, 40} == {50, 55, 60, 64}


@pytest.mark.slow
def test_a_checkpoint_that_lands_after_its_incident_is_kept_too(watched, tmp_path, monkeypatch):
    closed, steps = [], Checkpoints.steps

    def told(event, fields):
        if event == "incident_closed":
            closed.append(fields["closed"])

    # As if 40 were on its way to the disk until the incident is over.
    monkeypatch.setattr(
        Checkpoints, "steps", lambda self: [s for s in steps(self) if s != 40 or closed]
    )
    settings = watched("observe", **{"checkpoint.keep_last": 4, "checkpoint.keep_best": 0})
    training.train(settings, tmp_path / "run", tell=told)
    assert closed[0] < 60  # when the four newest would be without it
    assert (RunFolder(tmp_path / "run").checkpoints(0) / "40").is_dir()


# --- skipping updates ---


@pytest.fixture(scope="module")
def skipping(watched, tmp_path_factory):
    run = tmp_path_factory.mktemp("skipping") / "run"
    settings = watched(
        "skip_update",
        **{"spikes.lag": 3, "spikes.least_gradient_ratio": 1.2, "spikes.sigmas": 3.0},
    )
    return run, training.train(settings, run), settings


def test_a_skipped_update_is_recorded_with_its_limit(skipping):
    run, _, _ = skipping
    steps = computed(run, 0)
    skipped = [s for s, fields in steps.items() if not fields["applied"]]
    assert skipped
    for number, fields in steps.items():
        limit = float(fields["skip_above"])
        assert fields["applied"] == (float(fields["gradient_norm"]) < limit)
        if number in skipped and number + 1 in steps:
            assert steps[number + 1]["schedule_step"] == fields["schedule_step"]


@pytest.mark.slow
def test_skips_replay_and_survive_a_kill(skipping, tmp_path):
    run, outcome, settings = skipping
    for last in (41, 3, 100):
        stopped = training.train(settings, tmp_path / "run", stop_requested=StopAfter(last))
    assert stopped.state_digest == outcome.state_digest
    assert computed(tmp_path / "run", 0) == computed(run, 0)
    with Corpus.open(settings.data.corpus) as corpus:
        found = replay(
            RunFolder(run),
            30,
            STEPS,
            corpus=corpus,
            mesh=config.Mesh(fsdp=4),
            allow_environment=True,
        )
    assert found.identical, found.first_difference


@pytest.mark.slow
def test_steps_executed_again_keep_their_limit_under_another_policy(skipping, tmp_path):
    run, _, settings = skipping
    again = tmp_path / "run"
    shutil.copytree(run, again)
    checkpoints = RunFolder(again).checkpoints(0)
    for saved in checkpoints.iterdir():
        if int(saved.name) > 40:
            shutil.rmtree(saved)
    other = config.override(settings, ["spikes.policy=observe"])
    outcome = training.train(other, again)
    assert outcome.state_digest == training.train(settings, run).state_digest


# --- one bad shard, and a scale at its floor ---


def test_nonfinite_loss_on_one_shard_of_eight_skips_the_update_on_all(small):
    settings = small(**{"mesh.fsdp": 8, "model.tied_embedding": False})
    program = step.make_program(settings, sharding.make_mesh(settings.mesh), 256)
    state = program.init()
    broken = np.array(state.params["embedding_VD"])
    broken[7] = np.inf
    params = state.params | {
        "embedding_VD": jax.device_put(broken, state.params["embedding_VD"].sharding)
    }
    state = state.replace(params=params)
    tokens = np.full((8, 9), 5, np.int32)
    tokens[3, 2] = 7  # in the microbatch of one device alone
    before = jax.device_get(state)
    after, vitals = program.step(state, program.put(tokens), step.controls())
    assert not np.isfinite(vitals["loss"])
    assert not vitals["applied"]
    after = jax.device_get(after)
    assert int(after.step) == 1
    same = jax.tree.map(
        lambda a, b: np.asarray(a).tobytes() == np.asarray(b).tobytes(),
        dataclasses.replace(after, step=before.step),
        before,
    )
    assert all(jax.tree.leaves(same))


@pytest.mark.slow
def test_run_stops_when_the_loss_scale_stays_at_its_floor(watched, tmp_path):
    settings = watched(
        "observe",
        **{
            "precision.policy": "float16",
            # float16 overflows at this scale whatever the gradient.
            "precision.loss_scale_initial": 2.0**40,
            "precision.loss_scale_floor": 2.0**40,
            "precision.loss_scale_ceiling": 2.0**40,
            "precision.loss_scale_patience": 4,
        },
    )
    outcome = training.train(settings, tmp_path / "run")
    assert outcome.step < STEPS
    assert "4 steps in a row were not finite at the smallest loss scale" in outcome.gave_up


# --- alerts ---


@pytest.mark.slow
def test_alert_command_is_given_each_incident(watched, tmp_path):
    heard = tmp_path / "heard"
    settings = watched("observe", **{"log.alert_command": f"cat >> '{heard}'"})
    training.train(settings, tmp_path / "run")
    lines = [json.loads(line) for line in heard.read_text().splitlines()]
    assert [line["onset"] for line in lines if line["event"] == "incident"] == [
        e["onset"] for e in events(tmp_path / "run", "incident")
    ]


def test_an_alert_command_that_fails_is_told_and_harms_nothing(watched, rolled_back, tmp_path):
    settings = watched("rollback", **{"log.alert_command": "exit 3"})
    outcome = training.train(settings, tmp_path / "run")
    assert outcome.state_digest == rolled_back[1].state_digest
    assert events(tmp_path / "run", "alert_failed")[0]["exit_code"] == 3
