"""Diagnoses of real runs of the smallest model: bits, files, interruption, other devices."""

from __future__ import annotations

import json
import math
import pathlib
import shutil

import jax
import numpy as np
import pytest
from typer.testing import CliRunner

from palm_jax import cli, config, train
from palm_jax.corpus.reader import Corpus
from palm_jax.diagnosis import diagnose as diagnosing
from palm_jax.diagnosis.casefile import CaseFile
from palm_jax.errors import CannotDo, WrongInput
from palm_jax.record.folder import RunFolder

STEPS = {"before": 4, "after": 5}


@pytest.fixture(scope="module")
def run(small, tmp_path_factory):
    """Nothing is wrong with it."""
    settings = small(steps=30, **{"checkpoint.every": 5, "checkpoint.keep_last": 9})
    path = tmp_path_factory.mktemp("diagnosed") / "run"
    train.train(settings, path)
    return path


@pytest.fixture
def copied(run, tmp_path):
    return shutil.copytree(run, tmp_path / "run")


def content(folder: pathlib.Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "diagnoses" not in path.parts
    }


def case_of(path, at=22, mesh=None, **changes):
    folder = RunFolder(path)
    settings = folder.config()
    if mesh is not None:
        settings = settings.model_copy(update={"mesh": mesh})
    located = diagnosing.locate(folder, settings.spikes, at, None)
    corpus = Corpus.open(settings.data.corpus)
    plan = diagnosing.make_plan(folder, settings, corpus, located, **STEPS | changes)
    return diagnosing.Diagnosis(folder, settings, corpus, located, plan)


def results_of(case):
    return case.case.results(case.plan)


def test_replays_agree_with_each_other_and_the_record_and_leave_the_run_alone(copied):
    before = content(copied)
    case = case_of(copied)
    assert case.conduct() is None
    report = case.report("run")
    # Nothing was hurt, so two replays are enough.
    assert report["verdict"] == "hard batch"
    found = results_of(case)
    assert set(found) == {"H", "A1", "A2"}
    assert case.plan.arm("H").first < case.plan.fork == 18
    for step, bits in found["A1"]["bits"].items():
        assert bits == case.recorded.bits[int(step)]
    digests = found["H"]["state_digests"] | found["A1"]["state_digests"]
    recorded = {str(s): d for s, d in case.recorded.state_digests.items() if str(s) in digests}
    assert digests == recorded
    assert len(digests) >= 2
    assert found["A1"]["state_digest"] == found["A2"]["state_digest"]
    assert content(copied) == before
    assert json.loads((case.case.path / "verdict.json").read_text())["verdict"] == "hard batch"
    # The data were looked at, too: those of steps 22 to 24, beside as many others.
    found = report["forensics"]
    assert found["window_loss"] == pytest.approx(found["reference_loss"], rel=0.2)
    assert found["window_gradient_norm"] > 0
    # The first steps' gradients are those that the run had, where parameters are still the fork's.
    first = found["gradients"][0]
    assert first["step"] == 18
    recorded = case.recorded.bits[18]["gradient_norm"]
    wanted = np.array([int(recorded, 16)], np.uint32).view(np.float32)[0]
    assert first["norm"] == pytest.approx(float(wanted), rel=1e-5)
    assert first["cosine"] is None
    assert all(-1 <= g["cosine"] <= 1 for g in found["gradients"][1:])
    assert all(g["kurtosis"] > 1 for g in found["gradients"])


def test_the_probes_loss_is_that_of_held_out_sequences(copied):
    """Against losses from the state that the run saved, sequence by sequence."""
    case = case_of(copied)
    case.execute(case.plan.arm("H"))
    settings, course = case.settings, case.lab.course
    state, _ = case.lab.state_of(case.plan.arm("A1"))
    probe = case.lab.probe
    assert len(probe.tokens) == 32
    with Corpus.open(settings.data.corpus) as corpus:
        rows = corpus.read("held_out", range(32))
    assert (rows == probe.tokens).all()
    program = course.program_at(case.plan.fork)
    total = 0.0
    for first in range(0, 32, 8):
        sums = program.losses(
            state.params, program.put(rows[first : first + 8]), program.put(np.ones(8, bool))
        )
        total += math.fsum(np.asarray(sums.cross_entropy, np.float64).reshape(-1).tolist())
    wanted = total / (32 * settings.model.sequence_length)
    assert results_of(case)["H"]["probe"][-1] == pytest.approx(wanted, rel=1e-12)


@pytest.mark.slow
def test_arms_have_the_same_bits_on_other_devices(copied, tmp_path):
    here = case_of(copied)
    elsewhere = case_of(
        shutil.copytree(copied, tmp_path / "copy"), mesh=config.Mesh(data=2, fsdp=2)
    )
    for name in ("H", "A1", "N0", "C0", "B0", "E0", "D half the rate 0"):
        for case in (here, elsewhere):
            assert case.execute(case.plan.arm(name))
        one, other = (results_of(case)[name] for case in (here, elsewhere))
        for field in ("probe", "loss", "gradient_norm", "state_digest", "bits"):
            assert one[field] == other[field], (name, field)


@pytest.mark.slow
def test_every_arm_changes_what_it_says_and_nothing_else(copied):
    case = case_of(copied)
    names = ["H", "A1", "N0", "C0", "B0", "B3", "E0", "half rate 0", "D exclude 0"]
    names += [f"D {name} 0" for name in ("half the rate", "clip tighter", "new second moments")]
    for name in names:
        assert case.execute(case.plan.arm(name)), name
    found = results_of(case)
    own = found["A1"]
    # The same state everywhere that begins at the fork; the same loss until something changes.
    for name in names:
        arm = case.plan.arm(name)
        assert len(found[name]["probe"]) == arm.stop - arm.scored_from
        if arm.state_step == case.plan.fork and name not in ("H", "B3"):
            assert found[name]["begin"] == own["begin"], name
    assert found["N0"]["loss"] != own["loss"]
    assert sorted(found["N0"]["probe"]) != sorted(own["probe"])
    assert found["B0"]["begin"] != own["begin"]
    # The clocks of B are the spike's: the rate, and beta2 as the fork's updates count it.
    assert found["B0"]["rate"] == own["rate"]
    assert found["D half the rate 0"]["rate"][0] == own["rate"][0] / 2
    assert found["half rate 0"]["rate"][0] == own["rate"][0] / 2
    # What a treatment does begins with its first update.
    for name in names[-3:]:
        assert found[name]["loss"][0] == own["loss"][0], name
        assert found[name]["loss"][2] != own["loss"][2], name


def test_clocks_of_an_earlier_state_are_pinned_to_the_forks(copied):
    case = case_of(copied)
    case.execute(case.plan.arm("H"))
    fork, _ = case.lab.state_of(case.plan.arm("A1"))
    earlier, _ = case.lab.state_of(case.plan.arm("B0"))
    assert int(earlier.step) == case.plan.earlier[0] < case.plan.fork == int(fork.step)
    assert int(earlier.schedule_step) == int(fork.schedule_step) == 18
    counts = [
        int(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(earlier.optimizer)
        if "count" in jax.tree_util.keystr(path)
    ]
    assert set(counts) == {18}
    fresh, _ = case.lab.state_of(case.plan.arm("D new second moments 0"))
    assert int(fresh.schedule_step) == 18


def test_a_stopped_diagnosis_goes_on_with_the_arm_it_was_at(copied):
    case = case_of(copied)
    asked = iter([None, "SIGTERM"])
    assert case.conduct(stop_requested=lambda: next(asked, "SIGTERM")) == "SIGTERM"
    assert "A2" not in results_of(case)
    before = set(results_of(case))
    again = case_of(copied)
    done = []
    assert again.conduct(decided=lambda arm, findings: done.append(arm.name)) is None
    assert not before & set(done)
    assert set(results_of(again)) == {"H", "A1", "A2"}


def test_another_plan_for_the_same_spike_is_refused(copied):
    case_of(copied)
    with pytest.raises(WrongInput, match="has a diagnosis with other arms"):
        case_of(copied, after=4)
    assert case_of(copied, budget=9).plan.budget == 9


def test_a_plan_is_kept_whatever_becomes_of_the_run(copied):
    before = case_of(copied).plan
    for step in before.earlier[:2]:
        shutil.rmtree(copied / "segments" / "000" / "checkpoints" / str(step), ignore_errors=True)
    case = case_of(copied)
    assert case.plan == before
    # What a lost checkpoint had is computed from an older one.
    assert case.execute(case.plan.arm("H"))
    assert case.execute(case.plan.arm("B0"))


def test_a_damaged_result_is_refused_by_name(copied):
    case = case_of(copied)
    arm = case.plan.arm("A1")
    case.case.add(arm, {"arm": arm.model_dump(mode="json")})
    with pytest.raises(CannotDo, match=r"A1\.json is damaged"):
        case.findings()
    other = case.plan.arm("A2").model_dump(mode="json")
    numbers = {"begin": 1.0, "probe": [1.0] * case.plan.horizon, "loss": [], "gradient_norm": []}
    rest = {"bits": {}, "state_digests": {}, "state_digest": "", "damaged": [], "seconds": 1.0}
    rest |= {"rate": [], "applied": 0}
    case.case.add(arm, {"arm": other, **numbers, **rest})
    with pytest.raises(CannotDo, match=r"A1\.json is of an arm that differs"):
        case.findings()


def test_own_clocks_are_refused_where_the_rate_was_another(small, tmp_path):
    schedule = {"kind": "cosine", "peak": 0.01, "warmup_steps": 30, "decay_steps": 100}
    settings = small(steps=20, schedule=schedule, **{"checkpoint.every": 5})
    train.train(settings, tmp_path / "run")
    with pytest.raises(WrongInput, match="--other-rate"):
        case_of(tmp_path / "run", at=16, pinned=False)
    case_of(tmp_path / "run", at=16, pinned=False, other_rate=True)


def test_a_spike_at_the_beginning_has_nothing_to_be_compared_with(run):
    with pytest.raises(WrongInput, match="at the run's beginning"):
        case_of(run, at=0)


def test_a_corpus_of_suspects_has_no_other_data(run, monkeypatch):
    monkeypatch.setattr(Corpus, "num_sequences", lambda self, split: 100)
    with pytest.raises(WrongInput, match="no other data to compare with"):
        case_of(run)


# --- the command ---


def palm_jax(*arguments):
    return CliRunner().invoke(cli.app, list(map(str, arguments)))


@pytest.fixture(autouse=True)
def jax_as_it_is(monkeypatch):
    monkeypatch.setattr("palm_jax.cli.diagnose.prepare_jax", lambda settings: None)


def test_a_clean_run_has_no_incident(run):
    done = palm_jax("spikes", "diagnose", run, "--json")
    assert done.exit_code == 0
    assert json.loads(done.stdout)["verdict"] == "no incident"
    assert not (run / "diagnoses").exists()


def test_the_plan_is_told_without_executing_anything(run):
    options = ["--at", 22, "--before", 4, "--after", 5]
    done = palm_jax("spikes", "diagnose", run, "--plan", *options)
    assert done.exit_code == 0
    assert "fork before step 18, arms of 9 steps" in done.stdout
    for word in ("placebo", "another state, other data", "clip tighter", "exclude"):
        assert word in done.stdout
    plan = json.loads(palm_jax("spikes", "diagnose", run, "--plan", "--json", *options).stdout)
    assert (plan["onset"], plan["fork"], plan["stop"]) == (22, 18, 27)
    assert not (run / "diagnoses").exists()


def test_parts_executed_apart_are_collected(copied):
    options = [copied, "--at", 22, "--before", 4, "--after", 5]
    early = palm_jax("spikes", "diagnose", *options, "--arm", "A1")
    assert isinstance(early.exception, WrongInput)
    assert "--arm H first" in str(early.exception)
    for name in ("H", "A1"):
        assert palm_jax("spikes", "diagnose", *options, "--arm", name).exit_code == 0
    found = json.loads(palm_jax("spikes", "diagnose", *options, "--collect", "--json").stdout)
    assert (found["verdict"], found["next_arms"]) == ("inconclusive", ["A2"])
    assert palm_jax("spikes", "diagnose", *options, "--arm", "A2").exit_code == 0
    done = palm_jax("spikes", "diagnose", *options, "--collect")
    assert "verdict: hard batch" in done.stdout
    page = (copied / "reports" / "report.html").read_text()
    assert "Diagnosis of the spike at step 22" in page
    assert "<strong>hard batch</strong>" in page
    assert page.count("<polyline") == 2  # A1 and A2
    assert CaseFile.of(RunFolder(copied), 0, 22).path.is_dir()


def test_arms_executed_in_a_bundle_are_those_of_the_run(copied, tmp_path, monkeypatch):
    options = ["--at", 22, "--before", 4, "--after", 5]
    assert palm_jax("spikes", "diagnose", copied, *options, "--arm", "H").exit_code == 0
    done = palm_jax("spikes", "diagnose", copied, *options, "--bundle", tmp_path / "b", "--json")
    assert json.loads(done.stdout)["bundle"] == str(tmp_path / "b")
    # Neither the corpus nor the run is at hand where the bundle is taken.
    monkeypatch.setattr(Corpus, "open", lambda path: pytest.fail("a bundle brings its rows"))
    elsewhere = shutil.move(tmp_path / "b", tmp_path / "elsewhere")
    for name in ("A1", "C0", "B0", "E0"):
        where = ["spikes", "diagnose", elsewhere, *options, "--arm", name]
        done = palm_jax(*where)
        assert done.exit_code == 0, (done.output, done.exception)
    monkeypatch.undo()
    monkeypatch.setattr("palm_jax.cli.diagnose.prepare_jax", lambda settings: None)
    assert palm_jax("spikes", "diagnose", copied, *options, "--arm", "C0").exit_code == 0
    mine = next((copied / "diagnoses").glob("*/arms/C0.json")).read_text()
    theirs = next((elsewhere / "diagnoses").glob("*/arms/C0.json")).read_text()
    for field in ("probe", "loss", "state_digest"):
        assert json.loads(mine)[field] == json.loads(theirs)[field]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--plan", "--collect"], "exclude each other"),
        (["seed=1"], "seed would change what is diagnosed"),
        (["--at", 99], "--at 99"),
        (["--at", 22, "--arm", "Z9"], "there is none"),
    ],
)
def test_wrong_questions_are_refused(copied, arguments, told):
    done = palm_jax("spikes", "diagnose", copied, *arguments)
    assert isinstance(done.exception, WrongInput), done.output
    assert told in str(done.exception)
