"""Runs on a mixture: resumes, replays, exclusions and rollbacks as on one corpus."""

from __future__ import annotations

import collections
import json
import math
import pathlib
import shutil

import numpy as np
import pytest
from runs import StopAfter
from typer.testing import CliRunner

from palm_jax import cli, config, data
from palm_jax import train as training
from palm_jax.cli import terms
from palm_jax.corpus import planted, prepare
from palm_jax.corpus.corpora import Corpora, open_corpus
from palm_jax.diagnosis import bundles as diagnosis_bundles
from palm_jax.diagnosis import diagnose as diagnosing
from palm_jax.errors import WrongInput
from palm_jax.record import logbook, segments
from palm_jax.record.folder import RunFolder
from palm_jax.replay import branches, bundles
from palm_jax.replay.branches import Changes
from palm_jax.replay.replay import replay
from palm_jax.stream import Stream


@pytest.fixture(scope="module")
def folders(corpus_folder, tmp_path_factory) -> dict[str, str]:
    """Of English words, and of digits."""
    folder = tmp_path_factory.mktemp("digits")
    rng = np.random.default_rng(1)
    for number in range(40):
        text = " ".join(map(str, rng.integers(0, 1000, rng.integers(30, 60))))
        (folder / f"{number:03d}.txt").write_text(text)
    prepare.prepare(
        source=f"text:{folder}/*.txt", out=folder / "corpus", sequence_length=8, held_out=0.2
    )
    return {"words": str(corpus_folder), "digits": str(folder / "corpus")}


@pytest.fixture(scope="module")
def mixed(small, folders):
    """Builds configs of a run on three parts words and one of digits, later as much of both."""

    def build(corpora=folders, **changes) -> config.Config:
        mixture = {
            "corpora": corpora,
            "starts": [0, 6],
            "weights": [{"words": 0.75, "digits": 0.25}, {"words": 1, "digits": 1}],
        }
        return small(**{"data.corpus": None, "data.mixture": mixture, **changes})

    return build


@pytest.fixture(scope="module")
def original(mixed, tmp_path_factory) -> pathlib.Path:
    """Twelve steps, made at a stretch. Read only."""
    path = tmp_path_factory.mktemp("mixtures") / "run"
    training.train(mixed(), path)
    return path


@pytest.fixture
def run(original, tmp_path) -> RunFolder:
    shutil.copytree(original, tmp_path / "run")
    return RunFolder(tmp_path / "run")


def records(run: pathlib.Path, event: str) -> list[dict]:
    return [record for record in logbook.read(run).records if record["event"] == event]


def bits(run: pathlib.Path, segment: int = 0) -> dict[int, dict]:
    return {r["step"]: r["bits"] for r in records(run, "step") if r["segment"] == segment}


def replayed(run: RunFolder, start: int, stop: int, **options):
    with bundles.open_rows(run, run.config()) as corpus:
        return replay(run, start, stop, corpus=corpus, **options)


def palm_jax(*words: object) -> str:
    done = CliRunner().invoke(cli.app, [*map(str, words)])
    assert done.exit_code == 0, (done.output, done.exception)
    return done.stdout


def test_a_run_that_was_interrupted_ends_like_one_that_was_not(mixed, original, tmp_path):
    run = tmp_path / "run"
    assert training.train(mixed(), run, stop_requested=StopAfter(4)).stopped_by == "SIGTERM"
    resumed = training.train(mixed(), run)
    (whole,) = records(original, "stop")
    assert resumed.state_digest == whole["state_digest"]
    assert bits(run) == bits(original)


def test_a_run_replays_and_so_does_its_bundle(run, tmp_path):
    assert replayed(run, 0, 12).identical
    settings = run.config()
    with open_corpus(settings.data) as corpus:
        bundles.create(run, 5, 8, str(tmp_path / "bundle"), corpus=corpus)
    assert replayed(RunFolder(tmp_path / "bundle"), 5, 8).identical


def test_batches_are_those_of_the_weights(mixed, original):
    settings = mixed()
    fed = Stream.of(settings.data)
    steps = [collections.Counter(name for name, _ in fed.places(step)) for step in range(12)]
    assert steps[:5] == [{"words": 6, "digits": 2}] * 5
    assert steps[5] == {"words": 12, "digits": 4}  # the ramp
    assert steps[6:] == [{"words": 8, "digits": 8}] * 6
    with open_corpus(settings.data) as corpus:
        for record in records(original, "step"):
            batch = data.batch(
                corpus, 0, record["step"], settings.data.ramp, mixture=settings.data.mixture
            )
            assert record["computed"]["batch_digest"] == batch.digest
            assert record["computed"]["first_position"] == batch.first_position


def test_an_evaluation_says_what_each_corpus_takes(mixed, original):
    (evaluation,) = records(original, "evaluation")
    with open_corpus(mixed().data) as corpus:
        sizes = {
            name: one.manifest.splits["held_out"].target_bytes
            for name, one in corpus.corpora.items()
        }
    each = evaluation["corpora"]
    assert list(each) == ["words", "digits"]
    whole = sum(each[name] * size for name, size in sizes.items()) / sum(sizes.values())
    assert math.isclose(evaluation["bits_per_byte"], whole, rel_tol=1e-12)
    assert each["words"] != each["digits"]


def test_excluded_steps_are_left_out_of_each_corpus_and_nothing_else(run, mixed, folders):
    printed = palm_jax(
        "intervene", run.path, "--at", 8, "--exclude", "9:11", "--reason", "odd data"
    )
    # 6 + 6 + 6 + 6 + 6 + 12 words until step 6, then 8 a step; and likewise of the digits.
    assert "sequence positions 66:82 of words are left out" in printed
    assert "sequence positions 38:54 of digits are left out" in printed
    assert "words none; digits none" in printed
    outcome = training.train(mixed(), run.path)
    assert outcome.step == 12
    segment = segments.read(run.segment(1))
    assert segment.exclusions == ((38, 54, "digits"), (66, 82, "words"))
    described = json.loads((run.segment(1) / "segment.json").read_text())
    assert described["exclusions"] == [[38, 54, "digits"], [66, 82, "words"]]
    before, after = bits(run.path, 0), bits(run.path, 1)
    assert {8: after[8]} == {8: before[8]}
    fed = segment.stream_of(mixed())
    assert {p for name, p in fed.places(9) if name == "words"} == set(range(82, 90))
    assert [name for name, _ in fed.places(9)] == [
        name for name, _ in Stream.of(mixed().data).places(9)
    ]
    for number in (0, 1):
        assert replayed(run, 8, 12, segment=number).identical
    assert records(run.path, "step")[-1]["computed"]["first_position"] == 5 * 8 + 6 * 16 + 32
    told = palm_jax("logbook", run.path)
    assert "Excluded: 16 sequences, positions 66:82 of words." in told
    assert json.loads(palm_jax("logbook", run.path, "--json"))["sequences_excluded"] == 32
    palm_jax("report", run.path)
    page = (run.path / "reports" / "report.html").read_text()
    for of_corpus in ("positions 66:82 of words", "positions 38:54 of digits"):
        assert f"16 sequences left out, {of_corpus}, at step 9" in page


def test_steps_are_shown_with_their_corpora(run, mixed, tmp_path):
    printed = palm_jax("data", "show", run.path, "--step", 7, "--rows", 2)
    assert "step 7: 8 sequences of words from position 50, 8 sequences of digits from " in printed
    assert "row 0: sequence" in printed
    assert "from words: " in printed
    assert "from digits: " in printed
    shown = json.loads(palm_jax("data", "show", run.path, "--step", 7, "--json"))
    assert shown["corpora"] == ["words", "digits"] * 8
    assert shown["positions"][:4] == [50, 22, 51, 23]
    (tmp_path / "mixed.yaml").write_text(config.to_yaml(mixed()))
    of_config = json.loads(palm_jax("data", "show", tmp_path / "mixed.yaml", "--step", 7, "--json"))
    assert of_config == shown
    scanned = json.loads(palm_jax("data", "scan", run.path, "--steps", "6:8", "--json"))
    assert scanned["sequences"] == 32
    assert all(x["source"].startswith(("words: ", "digits: ")) for x in scanned["unusual"])


def test_a_run_goes_on_with_its_own_mixture_alone(run, mixed, folders, tmp_path):
    turned = dict(reversed(folders.items()))
    with pytest.raises(WrongInput, match=r"was trained on the corpus .*data\.mixture\.corpora\.di"):
        training.train(mixed(corpora=turned), run.path)
    weights = [{"words": 1, "digits": 1}]
    other = {"corpora": folders, "weights": weights}
    with pytest.raises(WrongInput, match=r"data\.mixture\.starts was \[0, 6\], now \[0\]"):
        training.train(mixed(**{"data.mixture": other}), run.path)
    one = {"data.corpus": folders["words"], "data.mixture": None}
    with pytest.raises(WrongInput, match=r"data\.mixture\.weights was .*, now None"):
        training.train(mixed(**one), run.path)
    moved = shutil.copytree(folders["digits"], tmp_path / "moved")
    outcome = training.train(mixed(corpora=folders | {"digits": str(moved)}, steps=13), run.path)
    assert outcome.step == 13
    assert replayed(run, 11, 13).identical


def test_a_replay_takes_folders_that_moved_and_no_other_weights(run, folders, tmp_path):
    moved = shutil.copytree(folders["digits"], tmp_path / "moved")
    place = f"data.mixture.corpora.digits={moved}"
    settings = terms.moved(run.config(), [place], "replayed")
    with bundles.open_rows(run, settings) as corpus:
        assert corpus.corpora["digits"].folder == moved
        assert replay(run, 11, 12, corpus=corpus).identical
    with pytest.raises(WrongInput, match=r"data\.mixture\.weights would change what is replayed"):
        terms.moved(
            run.config(),
            ["data.mixture.weights=[{words: 1, digits: 2}, {words: 1, digits: 1}]"],
            "replayed",
        )


def test_recurring_sequences_are_listed_by_corpus(mixed):
    settings = mixed(steps=100)
    segment = segments.Segment(exclusions=((3, 6, "words"), (20, 21, "digits")))
    ranges = {"words": range(400), "digits": range(400, 700)}
    found = branches.recurrences(settings, segment, ranges)
    words = data.sequence_ids(settings.seed, range(3, 6), 400, "words")
    digits = 400 + data.sequence_ids(settings.seed, [20], 300, "digits")
    assert found["sequence_ids"] == sorted([*words.tolist(), *digits.tolist()])
    assert found["excluded_positions"] == 4
    # 42 words and 14 digits until step 6, then 94 x 8 = 752 of both.
    assert found["epochs"] == {"words": [1], "digits": [1, 2]}


def test_the_model_must_fit_all_corpora(mixed, tmp_path):
    with pytest.raises(WrongInput, match=r"sequence_length=16, but data\.mixture\.corpora\.words="):
        training.train(mixed(**{"model.sequence_length": 16}), tmp_path / "run")


@pytest.mark.slow
def test_a_branch_without_some_steps_replays(run):
    made, _ = branches.create_branch(run, 6, Changes(exclude=((7, 9),), data_from=6))
    settings = made.config().model_copy(update={"steps": 10})
    training.train(settings, made.path, keep=False)
    assert replayed(made, 6, 10).identical
    assert {e[2] for e in segments.read(made.segment(0)).exclusions} == {"words", "digits"}


@pytest.mark.slow
def test_a_rollback_leaves_garbage_of_one_corpus_out(mixed, folders, tmp_path):
    spikes = {
        **{"window": 20, "min_history": 12, "patience_steps": 8, "nonfinite_steps": 3},
        **{"rewind_steps": 6, "exclude_batches": 20, "same_place_steps": 30},
    }
    changes = {
        "steps": 64,
        "data.ramp": {"starts": [0, 44], "sizes": [8, 16]},
        "schedule.peak": 0.03,
        "checkpoint.every": 5,
        "spikes": {"policy": "rollback", **spikes},
    }
    clean = mixed(**changes)
    with Corpora.open(folders) as corpus:
        size = corpus.corpora["digits"].num_sequences("train")
    positions = [
        position
        for step in range(40, 52)
        for name, position in Stream.of(clean.data).places(step)
        if name == "digits"
    ]
    ids = data.sequence_ids(clean.seed, positions, size, "digits")
    planted.plant(folders["digits"], tmp_path / "garbage", ids)
    garbage = mixed(corpora=folders | {"digits": str(tmp_path / "garbage")}, **changes)
    outcome = training.train(garbage, tmp_path / "run")
    run = RunFolder(tmp_path / "run")
    assert (outcome.step, run.last_segment()) == (64, 1)
    exclusions = segments.read(run.segment(1)).exclusions
    assert {name for _, _, name in exclusions} == {"words", "digits"}
    assert replayed(run, 35, 64, segment=1).identical


@pytest.mark.slow
def test_a_spike_of_a_mixture_can_be_diagnosed_and_so_can_its_bundle(mixed, tmp_path):
    settings = mixed(steps=30, **{"checkpoint.every": 5, "checkpoint.keep_last": 9})
    training.train(settings, tmp_path / "run")
    located = diagnosing.locate(RunFolder(tmp_path / "run"), settings.spikes, 22, None)

    def case_of(path):
        run, corpus = RunFolder(path), bundles.open_rows(RunFolder(path), settings)
        plan = diagnosing.make_plan(run, settings, corpus, located, before=4, after=5)
        return diagnosing.Diagnosis(run, settings, corpus, located, plan)

    case = case_of(tmp_path / "run")
    assert case.execute(case.plan.arm("H"))
    diagnosis_bundles.create(case, str(tmp_path / "bundle"))
    carried = case_of(tmp_path / "bundle")
    without = next(arm.name for arm in case.plan.arms if arm.feed == "excluded")
    for name in ("A1", "A2", "C0", without):
        for one in (case, carried):
            assert one.execute(one.plan.arm(name))
    results = case.case.results(case.plan)
    elsewhere = carried.case.results(carried.plan)
    for name in ("A1", "C0", without):
        assert results[name]["probe"] == elsewhere[name]["probe"]
    assert case.findings().replays.first_difference is None
    case.examine_data()
    suspects = case.case.forensics()["suspects"]
    assert all(s["sources"][0].startswith(("words: ", "digits: ")) for s in suspects)
