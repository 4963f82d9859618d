"""The loop: a run that stops and goes on is the run that never stopped."""

from __future__ import annotations

import json
import os
import pathlib
import shutil

import jax
import numpy as np
import pytest
from runs import StopAfter

from palm_jax import config, data, sharding, step
from palm_jax import train as training
from palm_jax.corpus import prepare
from palm_jax.corpus.reader import Corpus
from palm_jax.decoder import norms
from palm_jax.errors import CannotDo, WrongInput
from palm_jax.record import folder, lock, logbook
from palm_jax.record.checkpoints import Checkpoints
from palm_jax.use.evaluate import evaluate


def step_records(run: pathlib.Path) -> dict[int, dict]:
    """The last attempt of every step."""
    return {r["step"]: r for r in logbook.read(run).records if r["event"] == "step"}


def events(run: pathlib.Path, kind: str) -> list[dict]:
    return [record for record in logbook.read(run).records if record["event"] == kind]


@pytest.fixture(scope="module")
def straight(small, tmp_path_factory):
    """The run of `small()`, never stopped, and its outcome. Read only."""
    run = tmp_path_factory.mktemp("straight") / "run"
    return run, training.train(small(), run)


def test_run_ends_with_loss_evaluation_tokens_and_digest(straight):
    run, outcome = straight
    assert outcome.step == 12
    assert outcome.tokens == (5 * 8 + 7 * 16) * 8
    assert outcome.stopped_by is None
    assert outcome.evaluation.sequences > 0
    assert len(outcome.state_digest) == 16
    assert outcome.loss == step_records(run)[11]["computed"]["loss"]
    assert events(run, "stop")[-1]["state_digest"] == outcome.state_digest


def test_every_step_is_recorded_once_in_order_with_its_position(straight):
    run, _ = straight
    records = events(run, "step")
    assert [r["step"] for r in records] == list(range(12))
    assert [r["attempt"] for r in records] == [1] * 12
    starts = [r["computed"]["first_position"] for r in records]
    assert starts == [0, 8, 16, 24, 32, 40, 56, 72, 88, 104, 120, 136]
    assert records[-1]["computed"]["tokens"] == (5 * 8 + 7 * 16) * 8


# The first step, those before and after a checkpoint and a larger batch, and the last but one.
@pytest.mark.parametrize("last", [0, 3, 4, pytest.param(10, marks=pytest.mark.slow)])
def test_resumed_run_is_bit_identical(small, straight, tmp_path, last):
    run, settings = tmp_path / "run", small()
    stopped = training.train(settings, run, stop_requested=StopAfter(last))
    assert (stopped.step, stopped.stopped_by, stopped.evaluation) == (last + 1, "SIGTERM", None)
    resumed = training.train(settings, run)
    straight_run, outcome = straight
    assert resumed.state_digest == outcome.state_digest
    assert resumed.evaluation == outcome.evaluation
    again, once = step_records(run), step_records(straight_run)
    assert [again[s]["bits"] for s in range(12)] == [once[s]["bits"] for s in range(12)]


@pytest.mark.slow
def test_run_stopped_again_and_again_is_bit_identical(small, straight, tmp_path):
    run, settings = tmp_path / "run", small()
    for last in (1, 0, 3, 0):  # after 2, 3, 7 and 8 steps
        training.train(settings, run, stop_requested=StopAfter(last))
    assert training.train(settings, run).state_digest == straight[1].state_digest


@pytest.mark.slow
@pytest.mark.parametrize("stop", [True, False])
def test_stop_exactly_at_the_end_of_an_epoch_goes_on_with_the_next(
    small, tmp_path, monkeypatch, stop
):
    # 40 sequences: the first epoch ends with step 4.
    monkeypatch.setattr(Corpus, "num_sequences", lambda self, split: 40)
    settings, run = small(**{"data.ramp": {"sizes": [8]}}), tmp_path / "run"
    if stop:
        training.train(settings, run, stop_requested=StopAfter(4))
    training.train(settings, run)
    digests = [step_records(run)[s]["computed"]["batch_digest"] for s in range(12)]
    with Corpus.open(settings.data.corpus) as corpus:
        ids = [
            data.batch(corpus, 0, s, settings.data.ramp).sequence_ids.tolist() for s in range(12)
        ]
        wanted = [data.batch(corpus, 0, s, settings.data.ramp).digest for s in range(12)]
    assert digests == wanted
    for epoch in (ids[:5], ids[5:10]):
        assert sorted(i for batch in epoch for i in batch) == list(range(40))
    assert ids[:5] != ids[5:10]


def crash_at(monkeypatch, last: int) -> None:
    """Make the process die, as far as the run can tell, while it records step `last`."""
    add = training.StepRecorder.add

    def add_or_die(self, step, batch, vitals):
        if step == last:
            raise KeyboardInterrupt
        add(self, step, batch, vitals)

    monkeypatch.setattr(training.StepRecorder, "add", add_or_die)


@pytest.mark.parametrize("last", [2, 10])
def test_run_that_crashed_repeats_steps_with_the_same_bits(
    small, straight, tmp_path, monkeypatch, last
):
    run, settings = tmp_path / "run", small()
    with monkeypatch.context() as patch:
        crash_at(patch, last)
        with pytest.raises(KeyboardInterrupt):
            training.train(settings, run)
    resumed = training.train(settings, run)
    assert resumed.state_digest == straight[1].state_digest
    attempts = {}
    for record in events(run, "step"):
        attempts.setdefault(record["step"], []).append(record["attempt"])
    newest = last // 4 * 4  # checkpoints are saved every four steps
    flushed = last // 3 * 3 if last // 3 * 3 > newest else newest
    for index in range(12):
        assert attempts[index] == ([1, 2] if newest <= index < flushed else [1])


def test_repeated_step_with_other_bits_stops_the_run(small, tmp_path, monkeypatch):
    run, settings = tmp_path / "run", small()
    with monkeypatch.context() as patch:
        crash_at(patch, 3)  # steps 0 to 2 are in the logbook, and there is no checkpoint
        with pytest.raises(KeyboardInterrupt):
            training.train(settings, run)
    part = run / "logbook" / "0000.jsonl"
    lines = part.read_text().splitlines()
    (place,) = [n for n, line in enumerate(lines) if json.loads(line).get("step") == 1]
    record = json.loads(lines[place])
    record["bits"]["gradient_norm"] = f"{int(record['bits']['gradient_norm'], 16) ^ 1:08x}"
    lines[place] = json.dumps(record)
    part.write_text("\n".join(lines) + "\n")
    with pytest.raises(CannotDo, match="step 1 was executed before, and its gradient_norm"):
        training.train(settings, run)
    (difference,) = events(run, "difference")
    assert (difference["step"], difference["field"]) == (1, "gradient_norm")


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "policy"), [((4, 2), "bfloat16")])
def test_resume_is_bit_identical_on_every_mesh_and_in_both_formats(small, tmp_path, mesh, policy):
    settings = small(**{"mesh.data": mesh[0], "mesh.fsdp": mesh[1], "precision.policy": policy})
    one_device = training.train(small(**{"precision.policy": policy}), tmp_path / "one")
    straight = training.train(settings, tmp_path / "straight")
    training.train(settings, tmp_path / "stopped", stop_requested=StopAfter(6))
    resumed = training.train(settings, tmp_path / "stopped")
    assert resumed.state_digest == straight.state_digest == one_device.state_digest


def test_finished_run_is_left_alone_and_says_the_same(small, straight, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(straight[0], run)
    again = training.train(small(), run)
    assert again == straight[1]
    assert len(events(run, "step")) == 12


def test_longer_run_continues_and_records_the_changed_setting(small, straight, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(straight[0], run)
    outcome = training.train(small(steps=13), run)
    assert outcome.step == 13
    assert events(run, "start")[-1]["settings_changed"] == {"steps": [12, 13]}
    with pytest.raises(WrongInput, match=r"steps=12, but .* already made 13"):
        training.train(small(), run)


def test_code_that_would_read_other_data_may_not_go_on(small, straight, tmp_path, monkeypatch):
    run = tmp_path / "run"
    shutil.copytree(straight[0], run)
    monkeypatch.setattr(data, "_SHUFFLE_ROUNDS", 8)
    with pytest.raises(CannotDo, match=r"step 11 .* read a batch of digest"):
        training.train(small(steps=13), run)


def test_code_that_makes_another_program_may_not_go_on(
    small, straight, tmp_path, monkeypatch, compiled_afresh
):
    run = tmp_path / "run"
    shutil.copytree(straight[0], run)
    monkeypatch.setattr(norms, "EPSILON", 1e-5)
    with pytest.raises(CannotDo, match="the program for batches of 16 is not the one"):
        training.train(small(steps=13), run)
    assert Checkpoints(run / "segments/000/checkpoints", config.Checkpoint()).latest() == 12
    training.train(small(steps=13), run, allow_environment=True)
    first, *_, last = [e for e in events(run, "program") if e["batch_size"] == 16]
    assert first["lowered_digest"] != last["lowered_digest"]


# --- evaluation ---


def test_evaluating_does_not_disturb_training(small, straight, tmp_path):
    for every in (2, 3):
        run = tmp_path / f"every-{every}"
        outcome = training.train(small(**{"eval.every": every}), run)
        assert outcome.state_digest == straight[1].state_digest
        assert outcome.evaluation == straight[1].evaluation
        assert [e["step"] for e in events(run, "evaluation")] == list(range(every, 13, every))


@pytest.mark.parametrize(("lanes", "microbatch"), [(1, 1), (4, 1), (2, 5)])
def test_every_sequence_counts_whatever_the_batch(small, corpus_folder, lanes, microbatch):
    reference = small()
    mesh = sharding.make_mesh(reference.mesh)
    whole = step.make_program(reference, mesh, 256)
    params = whole.init().params
    batched = step.make_program(
        small(
            **{
                "numerics.lanes": lanes,
                "numerics.microbatch": microbatch,
                "data.ramp.sizes": [40, 40],
            }
        ),
        mesh,
        256,
    )
    with Corpus.open(corpus_folder) as corpus:
        num_sequences = corpus.num_sequences("held_out")
        assert num_sequences % (lanes * microbatch) or lanes * microbatch == 1
        one, other = evaluate(whole, params, corpus), evaluate(batched, params, corpus)
        # By hand, from the whole split as one batch on no mesh.
        tokens = corpus.read("held_out", range(num_sequences))
    assert one.sequences == other.sequences == num_sequences
    assert one.targets == other.targets == num_sequences * 8
    # 1e-6: microbatches of another size round differently in their matrix products.
    np.testing.assert_allclose(other.loss, one.loss, rtol=1e-6)
    assert one.perplexity == pytest.approx(np.exp(one.loss))
    num_bytes = int(np.sum(tokens[:, 1:] != 256))
    assert one.bits_per_byte == pytest.approx(one.loss * one.targets / np.log(2) / num_bytes)


# --- what is refused ---


def test_other_settings_are_refused_by_name(small, straight):
    run, _ = straight
    with pytest.raises(WrongInput, match=r"model.qk_norm was False, now True"):
        training.train(small(**{"model.qk_norm": True}), run)


def test_other_corpus_is_refused(small, straight, tmp_path):
    text = tmp_path / "text"
    text.mkdir()
    for number in range(30):
        (text / f"{number}.txt").write_text(f"another document, number {number}. " * 9)
    prepare.prepare(
        source=f"text:{text}/*.txt", out=tmp_path / "other", sequence_length=8, held_out=0.2
    )
    with pytest.raises(WrongInput, match="was trained on the corpus"):
        training.train(small(**{"data.corpus": str(tmp_path / "other")}), straight[0])


def test_moved_corpus_is_the_same_corpus(small, straight, corpus_folder, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(straight[0], run)
    shutil.copytree(corpus_folder, tmp_path / "moved")
    outcome = training.train(small(**{"data.corpus": str(tmp_path / "moved")}), run)
    assert outcome.state_digest == straight[1].state_digest


def test_model_that_does_not_fit_the_corpus_is_refused(small, tmp_path):
    with pytest.raises(WrongInput, match=r"sequence_length=16, but .* sequences of 8"):
        training.train(small(**{"model.sequence_length": 16}), tmp_path / "run")
    with pytest.raises(WrongInput, match=r"vocabulary_size=300, .* has 257 ids"):
        training.train(small(**{"model.vocabulary_size": 300}), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_changed_environment_is_refused_unless_allowed(small, straight, tmp_path, monkeypatch):
    run = tmp_path / "run"
    shutil.copytree(straight[0], run)
    capture = training.environment.capture

    def other(**arguments):
        return capture(**arguments) | {"jax": "9.9.9"}

    monkeypatch.setattr(training.environment, "capture", other)
    with pytest.raises(CannotDo, match=rf"jax was '{jax.__version__}', is '9.9.9'"):
        training.train(small(steps=13), run)
    assert len(events(run, "start")) == 1
    training.train(small(steps=13), run, allow_environment=True)
    assert list(events(run, "start")[-1]["environment_changed"]) == ["jax"]


def test_flipped_bit_in_a_checkpoint_is_refused_and_an_older_step_named(small, straight, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(straight[0], run)
    arrays = run / "segments" / "000" / "checkpoints" / "12" / "state"
    largest = max(
        (p for p in arrays.rglob("*") if p.is_file()), key=lambda path: path.stat().st_size
    )
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 4
    largest.write_bytes(content)
    with pytest.raises(CannotDo, match=r"checkpoint 12 .* is damaged: .* use step 8 instead"):
        training.train(small(steps=13), run)


def test_half_checkpoint_is_passed_over_and_reported(small, straight, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(straight[0], run)
    checkpoints = run / "segments" / "000" / "checkpoints"
    (checkpoints / "15").mkdir()
    outcome = training.train(small(steps=15), run)
    start = events(run, "start")[-1]
    assert (start["step"], start["leftovers"]) == (12, ["15"])
    assert outcome.step == Checkpoints(checkpoints, config.Checkpoint()).latest() == 15


def test_folder_that_holds_something_else_is_refused_and_untouched(small, tmp_path):
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "a.txt").write_text("hello")
    with pytest.raises(WrongInput, match="is not a run"):
        training.train(small(), tmp_path / "letters")
    assert [p.name for p in (tmp_path / "letters").iterdir()] == ["a.txt"]
    assert [p.name for p in tmp_path.iterdir()] == ["letters"]


def test_unwritable_place_is_refused(small, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(CannotDo, match="cannot create the run folder"):
        training.train(small(), tmp_path / "file" / "run")


@pytest.mark.parametrize("name", ["a b", "höhe-λ"])
def test_run_folder_may_have_any_name_and_be_relative(small, straight, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    training.train(small(), f"runs/{name}", stop_requested=StopAfter(4))
    monkeypatch.chdir("/")
    outcome = training.train(small(), tmp_path / "runs" / name)
    assert outcome.state_digest == straight[1].state_digest


def test_url_is_refused_and_makes_no_folder(small, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(WrongInput, match="gs://bucket/x"):
        training.train(small(), "gs://bucket/x")
    assert list(tmp_path.iterdir()) == []


def test_second_training_of_a_run_is_refused_while_the_first_goes_on(small, straight, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(straight[0], run)
    with lock.held(run), pytest.raises(CannotDo, match="another process"):
        training.train(small(steps=13), run)
    training.train(small(steps=13), run)


# --- the record ---


def test_run_that_diverges_leaves_a_strict_logbook_and_skips_what_is_not_finite(small, tmp_path):
    run = tmp_path / "run"
    diverging = {"schedule.peak": 1e18, "steps": 4, "optimizer.weight_decay_exponent": None}
    training.train(small(**diverging), run)
    records = step_records(run)  # read strictly: NaN is not JSON
    assert any(isinstance(r["computed"]["loss"], str) for r in records.values())
    assert not records[3]["computed"]["applied"]
    assert records[3]["bits"]["loss"] != records[0]["bits"]["loss"]


def test_device_arrays_do_not_pile_up_between_flushes(small, tmp_path):
    alive = []

    def tell(event, fields):
        if event == "step":
            alive.append(len(jax.live_arrays()))

    settings = small(
        steps=60, **{"log.every": 20, "checkpoint.every": 60, "data.ramp": {"sizes": [8]}}
    )
    training.train(settings, tmp_path / "run", tell=tell)
    assert len(alive) == 3
    assert len(set(alive)) == 1


@pytest.mark.slow
def test_memory_stays_flat_over_two_thousand_steps(small, tmp_path):
    page, seen = os.sysconf("SC_PAGE_SIZE"), {}

    def watch(event, fields):
        if event == "step":
            resident = int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * page
            seen[fields["step"] + 1] = len(jax.live_arrays()), resident

    many = {"steps": 2000, "log.every": 100, "checkpoint.every": 500, "checkpoint.keep_last": 2}
    training.train(small(**many, **{"data.ramp": {"sizes": [8]}}), tmp_path / "run", tell=watch)
    arrays = {count for step, (count, _) in seen.items() if 200 <= step < 2000}
    assert len(arrays) == 1, seen
    # Seen: 3 MiB, of detection's windows. The vitals of 1,000 steps would be 20,000 arrays.
    assert seen[2000][1] - seen[1000][1] < 16 * 2**20, seen


def test_training_reads_what_the_data_function_says(small, straight):
    run, _ = straight
    settings = small()
    with Corpus.open(settings.data.corpus) as corpus:
        for index in (0, 4, 5, 11):
            batch = data.batch(corpus, settings.seed, index, settings.data.ramp)
            assert step_records(run)[index]["computed"]["batch_digest"] == batch.digest


def test_config_of_the_run_is_complete_and_loads_to_the_same(small, straight):
    assert folder.RunFolder(straight[0]).config() == small()
