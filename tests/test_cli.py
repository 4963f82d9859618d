"""The command line as a person or a script meets it: what it prints, its exit codes, signals."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time

import pytest
import yaml

from palm_jax import config, data, start
from palm_jax.corpus.reader import Corpus
from palm_jax.record import logbook

STEPS = 200
SETTINGS = {
    "steps": STEPS,
    "model": {
        "num_layers": 2,
        "width": 16,
        "num_heads": 2,
        "head_size": 8,
        "vocabulary_size": 257,
        "sequence_length": 16,
    },
    "data": {"corpus": "corpus", "ramp": {"starts": [0, 20], "sizes": [8, 16]}},
    "checkpoint": {"every": 50},
    "log": {"every": 1, "tensorboard": False},
}
SET_BY_CONFTEST = ("JAX_PLATFORMS", "NPROC", "XLA_FLAGS")
WORDS = ("the", "a", "model", "step", "loss", "spike", "batch", "token", "and", "of", "again")


@dataclasses.dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str

    @property
    def json(self) -> dict:
        """The one object that stdout holds."""
        return json.loads(self.out)


class Place:
    """A working folder, and the real command line run in it."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        # As a person's shell has it, but for compiled programs, which all tests share.
        self.environ = {k: v for k, v in os.environ.items() if k not in SET_BY_CONFTEST}
        self.environ["XDG_CACHE_HOME"] = str(start.cache_folder() / "tests")
        self.environ["PYTHONPATH"] = str(pathlib.Path(__file__).parent.parent)

    def start(
        self, *arguments: object, stdout: object = subprocess.PIPE, **environ: object
    ) -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, "-m", "palm_jax.cli", *map(str, arguments)],
            cwd=self.folder,
            env={**self.environ, **{key: str(value) for key, value in environ.items()}},
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=subprocess.PIPE,
            text=True,
        )

    def __call__(self, *arguments: object, **more: object) -> Done:
        return finish(self.start(*arguments, **more))


def follow(process: subprocess.Popen, text: str) -> str:
    """Read stderr up to the line with `text`."""
    seen = ""
    for line in process.stderr:
        seen += line
        if text in line:
            return seen
    raise AssertionError(f"{text!r} was never said, but:\n{seen}")


def finish(process: subprocess.Popen, seen: str = "") -> Done:
    out, err = process.communicate(timeout=300)
    return Done(process.returncode, out or "", seen + err)


def steps_of(run: pathlib.Path) -> dict[int, dict]:
    """The last attempt of every step."""
    return {r["step"]: r for r in logbook.read(run).records if r["event"] == "step"}


@pytest.fixture(scope="module")
def palm_jax(tmp_path_factory):
    """The command line in a folder with texts, a config and a corpus."""
    place = Place(tmp_path_factory.mktemp("place"))
    rng = random.Random(0)
    (place.folder / "text").mkdir()
    for number in range(60):
        words = " ".join(rng.choices(WORDS, k=rng.randrange(20, 60)))
        (place.folder / "text" / f"{number:02d}.txt").write_text(words)
    (place.folder / "small.yaml").write_text(yaml.safe_dump(SETTINGS))
    return place


@pytest.fixture(scope="module")
def prepared(palm_jax):
    """What preparing the corpus said."""
    done = palm_jax(
        *("data", "prepare", "--source", "text:text/*.txt", "--out", "corpus"),
        *("--sequence-length", 16, "--held-out", 0.2, "--json"),
    )
    assert done.code == 0, done.err
    return done


@pytest.fixture(scope="module")
def trained(palm_jax, prepared):
    """What the run `runs/straight`, which nobody disturbs, said."""
    done = palm_jax("train", "small.yaml", "--run", "runs/straight", "--json")
    assert done.code == 0, done.err
    return done


@pytest.fixture
def copied(palm_jax, trained, tmp_path):
    """A copy of the trained run."""
    return pathlib.Path(shutil.copytree(palm_jax.folder / "runs/straight", tmp_path / "run"))


# --- what a command prints ---


def test_prepare_says_what_the_corpus_holds(palm_jax, prepared):
    sizes = [path.stat().st_size for path in (palm_jax.folder / "text").iterdir()]
    said = prepared.json
    splits = said["splits"].values()
    assert said["out"] == "corpus"
    assert said["documents_read"] == len(sizes) == sum(s["documents"] for s in splits)
    assert sum(split["bytes"] for split in splits) == sum(sizes)
    assert sum(split["tokens"] for split in splits) == sum(sizes) + len(sizes)
    assert (
        said["digest"]
        == json.loads((palm_jax.folder / "corpus/manifest.json").read_text())["digest"]
    )
    room, *stages = prepared.err.splitlines()
    assert re.fullmatch(r"on disk this takes about 0 MB; [\d,]+ MB are free", room)
    assert stages == ["reading ...", "writing ..."]


def test_preparing_again_says_the_same(palm_jax, prepared):
    again = palm_jax(
        *("data", "prepare", "--source", "text:text/*.txt", "--out", "corpus", "--workers", 1),
        *("--sequence-length", 16, "--held-out", 0.2, "--json"),
    )
    assert (again.code, again.out) == (0, prepared.out)


def test_training_ends_with_one_json_object(palm_jax, trained):
    said = trained.json
    assert trained.out.count("\n") == 1
    assert set(said) == {"run", "step", "loss", "eval", "tokens", "state_digest", "gave_up"}
    assert said["gave_up"] is None
    assert said["run"] == "runs/straight"
    assert said["step"] == STEPS
    assert said["tokens"] == (20 * 8 + 180 * 16) * 16
    assert said["eval"].keys() >= {"loss", "perplexity", "bits_per_byte", "sequences"}
    assert said["eval"]["sequences"] > 0
    assert re.fullmatch("[0-9a-f]{16}", said["state_digest"])
    assert (
        said["loss"] == steps_of(palm_jax.folder / "runs/straight")[STEPS - 1]["computed"]["loss"]
    )


def test_progress_goes_to_stderr_as_plain_lines(trained):
    lines = trained.err.splitlines()
    assert [line for line in lines if line.startswith("step ")][-1].startswith("step 200/200  loss")
    assert sum(line.startswith("step ") for line in lines) == STEPS
    assert lines[-1] == f"checkpoint 200, state digest {trained.json['state_digest']}"
    assert "\x1b" not in trained.err
    assert "\r" not in trained.err


def test_dry_run_says_what_is_needed_and_makes_nothing(palm_jax, prepared, trained):
    before = sorted(palm_jax.folder.rglob("*"))
    done = palm_jax("train", "small.yaml", "--run", "runs/never", "--dry-run", "--json")
    assert done.code == 0, done.err
    said = done.json
    D, F, V, N = 16, 64, 257, 2
    # Queries and output are D x D, the one head of keys and of values D x 8; SwiGLU has three
    # matrices; a layer has one norm, and the last norm has no scale.
    by_hand = V * D + N * (2 * D * D + 2 * D * 8 + 3 * D * F + D)
    assert said["parameters"] == by_hand
    assert said["tokens"] == trained.json["tokens"]
    assert said["stages"] == [
        {"start_step": 0, "batch_size": 8, "tokens": 20 * 8 * 16},
        {"start_step": 20, "batch_size": 16, "tokens": 180 * 16 * 16},
    ]
    padded = by_hand + (384 - V) * D  # parameters and two moments of float32, and counters
    assert 0 <= said["state_bytes"] - 3 * 4 * padded <= 64
    assert said["checkpoint_bytes"] == said["state_bytes"]
    assert said["free_disk_bytes"] > 0
    assert said["corpus"] == prepared.json["digest"]
    assert config.from_dict(said["config"]) == config.from_dict(SETTINGS)
    assert sorted(palm_jax.folder.rglob("*")) == before


def test_dry_run_works_before_the_corpus_is_there(palm_jax):
    done = palm_jax("train", "small.yaml", "data.corpus=later", "--dry-run")
    assert done.code == 0, done.err
    assert "data.corpus=later is not there yet: `palm-jax data prepare`" in done.out
    assert not (palm_jax.folder / "later").exists()


@pytest.mark.parametrize("where", ["runs/straight", "small.yaml"])
def test_show_agrees_with_the_data_function_and_the_logbook(palm_jax, trained, where):
    settings = config.from_dict(SETTINGS)
    with Corpus.open(palm_jax.folder / "corpus") as corpus:
        batch = data.batch(corpus, settings.seed, 23, settings.data.ramp)
    done = palm_jax("data", "show", where, "--step", 23, "--json")
    assert done.code == 0, done.err
    assert done.json == {
        "step": 23,
        "first_position": 20 * 8 + 3 * 16,
        "batch_size": 16,
        "sequence_ids": batch.sequence_ids.tolist(),
        "digest": batch.digest,
    }
    recorded = steps_of(palm_jax.folder / "runs/straight")[23]["computed"]
    assert recorded["batch_digest"] == done.json["digest"]


def test_shown_text_is_in_the_documents_that_are_named(palm_jax, trained):
    done = palm_jax("data", "show", "runs/straight", "--step", 0, "--rows", 8)
    assert done.code == 0, done.err
    rows = re.split(r"\n--- row \d+: ", done.out)[1:]
    assert len(rows) == 8
    for row in rows:
        heading, text = row.split("\n", 1)
        names = re.findall(r"(\d\d\.txt) \[", heading)
        pieces = text.rstrip("\n").split("<|end of document|>")
        texts = [(palm_jax.folder / "text" / name).read_text() for name in names]
        assert all(any(piece in whole for whole in texts) for piece in pieces)


def test_finished_run_says_the_same_again(palm_jax, trained, copied):
    again = palm_jax("train", "small.yaml", "--run", copied, "--json")
    assert again.code == 0, again.err
    assert again.json == {**trained.json, "run": str(copied)}


@pytest.mark.slow
def test_run_is_continued_from_another_folder_and_by_another_name(palm_jax, copied, tmp_path):
    elsewhere = Place(tmp_path)
    (tmp_path / "link").symlink_to(copied)
    corpus = f"data.corpus={palm_jax.folder / 'corpus'}"
    done = elsewhere("train", palm_jax.folder / "small.yaml", corpus, "--run", "link/", "--json")
    assert done.code == 0, done.err
    assert done.json["step"] == STEPS


@pytest.mark.parametrize(
    "command", [(), ("train",), ("data",), ("data", "prepare"), ("data", "show")]
)
def test_help_shows_every_command_with_an_example(palm_jax, command):
    done = palm_jax(*command, "--help")
    assert (done.code, done.err) == (0, "")
    if command in ((), ("data",)):
        assert all(name in done.out for name in ("train", "data")[len(command) :])
    else:
        assert f"Example: palm-jax {' '.join(command)}" in done.out


# --- wrong input: exit code 2 ---


def refused(done: Done, code: int, *words: str) -> None:
    assert done.code == code, done
    assert done.out == ""
    assert "Traceback" not in done.err
    (message,) = [line for line in done.err.splitlines() if line.startswith("error: ")]
    assert done.err.endswith(message + "\n")
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["small.yaml", "model.widht=16", "--run", "no"], ["model.widht", "model.width"]),
        (["small.yaml", "data.width=16", "--run", "no"], ["data.width", "model.width"]),
        (["small.yaml", "steps=many", "--run", "no"], ["steps='many'"]),
        (["small.yaml", "schedule.peak=abc", "--run", "no"], ["schedule.peak='abc'"]),
        (["small.yaml", "steps", "--run", "no"], ["'steps'", "section.key=value"]),
        (["missing.yaml", "--run", "no"], ["missing.yaml"]),
        (["small.yaml"], ["--run is missing"]),
        (["small.yaml", "data.ramp.sizes=[8, 12]", "--run", "no"], ["12", "numerics.lanes", "8"]),
        (["small.yaml", "mesh.fsdp=3", "--run", "no"], ["3", "must divide numerics.lanes=8"]),
        (
            ["small.yaml", "data.corpus=nowhere", "--run", "no"],
            ["data.corpus=", "nowhere", "palm-jax data prepare"],
        ),
        (
            ["small.yaml", "model.sequence_length=32", "--run", "no"],
            ["model.sequence_length=32", "sequences of 16"],
        ),
        (
            ["small.yaml", "model.vocabulary_size=300", "--run", "no", "--dry-run"],
            ["model.vocabulary_size=300", "257 ids"],
        ),
        (["small.yaml", "model.qk_norm=true", "--run", "runs/straight"], ["model.qk_norm was"]),
        (["small.yaml", "steps=150", "--run", "runs/straight"], ["steps=150", "200"]),
        (["small.yaml", "--run", "text"], ["is not a run"]),
        (["small.yaml", "--run", "gs://bucket/x"], ["gs://bucket/x"]),
    ],
)
def test_wrong_input_is_one_message_and_makes_nothing(palm_jax, trained, arguments, words):
    before = sorted(palm_jax.folder.rglob("*"))
    refused(palm_jax("train", *arguments, "--json"), 2, *words)
    assert sorted(palm_jax.folder.rglob("*")) == before


def test_wrong_input_of_the_data_commands_is_one_message(palm_jax, trained):
    prepare = ("data", "prepare", "--json", "--out", "other", "--source")
    refused(palm_jax(*prepare, "text:none/*"), 2, "text:none/*", "matches no file")
    refused(palm_jax(*prepare, "book"), 2, "book", "text:GLOB")
    show = ("data", "show", "--json", "--step", 1)
    refused(palm_jax(*show, "runs/straight", "seed=5"), 2, "runs/straight", "another seed")
    refused(palm_jax(*show, "nowhere"), 2, "nowhere")
    refused(palm_jax(*show, "text"), 2, "text")
    assert not (palm_jax.folder / "other").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "small.yaml", "--rum", "x"],
        ["trian", "small.yaml"],
        ["train"],
        ["data", "show", "small.yaml", "--step", "-1"],
        ["data", "show", "small.yaml", "--step", "one"],
    ],
)
def test_usage_errors_are_wrong_input(palm_jax, arguments):
    done = palm_jax(*arguments)
    assert (done.code, done.out) == (2, "")
    assert "Usage: " in done.err
    assert "Traceback" not in done.err


# --- what cannot be done: exit code 3 ---


def test_unwritable_places_are_refused(palm_jax, prepared):
    refused(
        palm_jax("train", "small.yaml", "--run", "small.yaml/run", "--json"), 3, "small.yaml/run"
    )
    source = ("--source", "text:text/*.txt", "--held-out", 0.2, "--sequence-length", 16)
    refused(
        palm_jax("data", "prepare", *source, "--out", "small.yaml/corpus", "--json"),
        3,
        "small.yaml/corpus",
    )


def test_mesh_larger_than_the_machine_is_refused(palm_jax, prepared):
    done = palm_jax("train", "small.yaml", "mesh.fsdp=8", "--run", "runs/wide", "--json")
    refused(done, 3, "1 x 8 x 1 = 8 devices", "mesh.emulated_devices=8")
    assert not (palm_jax.folder / "runs/wide").exists()


def test_damaged_checkpoint_is_refused(palm_jax, copied):
    files = (copied / "segments/000/checkpoints/200/state").rglob("*")
    largest = max((path for path in files if path.is_file()), key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)
    done = palm_jax("train", "small.yaml", "steps=210", "--run", copied, "--json")
    refused(done, 3, "checkpoint 200", "damaged", "150")


def test_run_that_lost_a_part_is_refused(palm_jax, copied):
    shutil.rmtree(copied / "segments")
    refused(palm_jax("train", "small.yaml", "--run", copied), 3, "holds no segment")
    (copied / "manifest.json").unlink()
    refused(palm_jax("train", "small.yaml", "--run", copied), 3, "has no manifest.json")


def test_changed_environment_is_refused_unless_allowed(palm_jax, copied):
    longer = ("train", "small.yaml", "steps=201", "--run", copied, "--json")
    flag = "--xla_cpu_enable_fast_math=false"
    refused(palm_jax(*longer, XLA_FLAGS=flag), 3, "XLA_FLAGS", flag, "--allow-environment")
    allowed = palm_jax(*longer, "--allow-environment", XLA_FLAGS=flag)
    assert allowed.code == 0, allowed.err
    assert "environment: XLA_FLAGS was []" in allowed.err
    assert allowed.json["step"] == 201


def test_full_disk_under_stdout_is_one_message(palm_jax, prepared):
    if not pathlib.Path("/dev/full").exists():
        pytest.skip("/dev/full is Linux's")
    with open("/dev/full", "w") as full:
        done = palm_jax("data", "show", "small.yaml", "--step", 1, "--json", stdout=full)
    refused(done, 3, "No space left")


def test_training_that_nobody_listens_to_any_more_says_so_by_its_exit_code(
    palm_jax, prepared, tmp_path
):
    with palm_jax.start("train", "small.yaml", "--run", tmp_path / "run", "--json") as process:
        follow(process, "compiling")
        process.stderr.close()
        assert process.stdout.read() == ""
    assert process.returncode == 3


# --- signals: exit code 4 ---


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_signal_saves_and_the_same_command_continues(palm_jax, trained, tmp_path, number):
    command = ("train", "small.yaml", "--run", tmp_path / "run", "--json")
    process = palm_jax.start(*command)
    seen = follow(process, "step 3/")
    process.send_signal(number)
    stopped = finish(process, seen)
    assert stopped.code == 4, stopped.err
    step = stopped.json["step"]
    assert 3 <= step < STEPS
    assert stopped.json["eval"] is None
    assert f"stopped by {number.name} after step {step}" in stopped.err
    assert (tmp_path / "run/segments/000/checkpoints" / str(step)).is_dir()
    resumed = palm_jax(*command)
    assert resumed.code == 0, resumed.err
    assert f"continues at step {step} of 200" in resumed.err
    assert resumed.json == {**trained.json, "run": str(tmp_path / "run")}
    once = steps_of(palm_jax.folder / "runs/straight")
    again = steps_of(tmp_path / "run")
    assert all(again[s]["attempt"] == 1 for s in range(STEPS))
    assert [again[s]["bits"] for s in range(STEPS)] == [once[s]["bits"] for s in range(STEPS)]


@pytest.mark.slow
def test_signal_during_the_first_compilation_saves_the_first_step(palm_jax, trained, tmp_path):
    command = ("train", "small.yaml", "steps=2", "--run", tmp_path / "run", "--json")
    process = palm_jax.start(*command, XDG_CACHE_HOME=tmp_path / "cache")  # nothing compiled
    seen = follow(process, "compiling")
    process.send_signal(signal.SIGTERM)
    stopped = finish(process, seen)
    assert (stopped.code, stopped.json["step"]) == (4, 1), stopped.err
    first = steps_of(palm_jax.folder / "runs/straight")[0]
    assert steps_of(tmp_path / "run")[0]["bits"] == first["bits"]
    assert palm_jax(*command).json["step"] == 2


@pytest.mark.slow
def test_second_interrupt_ends_at_once_and_does_no_harm(palm_jax, trained, tmp_path):
    command = ("train", "small.yaml", "steps=2", "--run", tmp_path / "run", "--json")
    process = palm_jax.start(*command, XDG_CACHE_HOME=tmp_path / "cache")  # compiles for seconds
    seen = follow(process, "compiling")
    process.send_signal(signal.SIGINT)
    seen += follow(process, "SIGINT")
    process.send_signal(signal.SIGINT)
    ended = finish(process, seen)
    assert (ended.code, ended.out) == (130, "")
    assert "Traceback" not in ended.err
    assert not steps_of(tmp_path / "run")
    resumed = palm_jax(*command)
    assert (resumed.code, resumed.json["step"]) == (0, 2), resumed.err


# --- devices and deaths ---


@pytest.mark.slow
def test_eight_emulated_devices_end_in_the_same_digest(palm_jax, trained):
    mesh = ("mesh.emulated_devices=8", "mesh.fsdp=8")
    done = palm_jax("train", "small.yaml", *mesh, "--run", "runs/eight", "--json")
    assert done.code == 0, done.err
    assert done.json == {**trained.json, "run": "runs/eight"}


@pytest.mark.slow
def test_run_killed_again_and_again_ends_in_the_same_digest(palm_jax, trained, tmp_path):
    settings = ("checkpoint.every=3", "eval.every=5", "checkpoint.keep_last=2")
    run = tmp_path / "run"
    command = ("train", "small.yaml", *settings, "--run", run, "--json")
    rng = random.Random(0)
    # The first kills are aimed: at both compilations, at saving and at evaluating. The others
    # come any time after the start, so that some come before there is anything to lose.
    aimed = ["compiling", "step 3/", "held out after step 5", "step 20/", "checkpoint 27"]
    kills = 0
    while True:
        # Nothing is compiled beforehand; what is, is kept, also by a process that is killed.
        process = palm_jax.start(*command, XDG_CACHE_HOME=tmp_path / "cache")
        if kills < 10:
            if kills < len(aimed):
                follow(process, aimed[kills])
                time.sleep(rng.uniform(0, 0.02))
            else:
                follow(process, "compiling") if rng.random() < 0.8 else None
                time.sleep(rng.uniform(0, 2))
            process.kill()
        done = finish(process)
        if done.code == 0:
            break
        assert done.code == -signal.SIGKILL, done
        kills += 1
    assert kills >= 6
    assert done.json == {**trained.json, "run": str(run)}
    once, again = steps_of(palm_jax.folder / "runs/straight"), steps_of(run)
    assert [again[s]["bits"] for s in range(STEPS)] == [once[s]["bits"] for s in range(STEPS)]
    checkpoints = {path.name for path in (run / "segments/000/checkpoints").iterdir()}
    assert len(checkpoints) <= 3  # the last two and the best
    assert str(STEPS) in checkpoints
    assert all(name.isdigit() for name in checkpoints)


# --- history ---


def test_replay_of_a_run_is_identical_and_of_a_tampered_copy_is_not(palm_jax, trained, copied):
    done = palm_jax("replay", "runs/straight", "--steps", "190:195", "--json")
    assert done.code == 0, done.err
    said = done.json
    assert said.keys() >= {
        *("identical", "compared_steps", "fields", "from_checkpoint", "first_difference"),
    }
    assert (said["identical"], said["compared_steps"], said["from_checkpoint"]) == (True, 5, 150)
    part = copied / "logbook" / "0000.jsonl"
    text = part.read_text()
    bits = steps_of(copied)[192]["bits"]["gradient_norm"]
    part.write_text(text.replace(bits, f"{int(bits, 16) ^ 1:08x}"))
    done = palm_jax("replay", copied, "--steps", "190:195")
    assert done.code == 1, done.err
    assert "first difference: step 192, gradient_norm" in done.out
    assert "DIFFERENT: 5 steps" in done.out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("replay", "runs/straight", "--steps", "9:4"), "give A:B"),
        (("replay", "runs/straight", "--steps", "190:999"), "no record of step 200"),
        (("replay", "corpus", "--steps", "1:2"), "is not a run's folder"),
        (("replay", "runs/straight", "--steps", "1:2", "seed=3"), "seed would change"),
        (("branch", "show", "runs/straight", "x"), "has no branch 'x'"),
        (("logbook", "corpus"), "is not a run's folder"),
        (("bundle", "runs/straight", "--steps", "190:195", "--out", "corpus"), "exists"),
    ],
)
def test_wrong_questions_about_a_run_are_refused(palm_jax, trained, arguments, said):
    done = palm_jax(*arguments)
    assert (done.code, done.out) == (2, ""), done.err
    assert said in done.err
    assert "Traceback" not in done.err


@pytest.mark.slow
def test_run_is_branched_promoted_changed_and_bundled_from_the_command_line(palm_jax, copied):
    run = copied
    made = palm_jax(
        *("branch", "run", run, "--from", 150, "--until", 160, "schedule.peak=0.005"),
        *("--name", "half", "--reason", "is it the rate?", "--json"),
    )
    assert made.code == 0, made.err
    assert made.json["changes"] == {"schedule.peak": 0.005}
    assert "clocks: data of step 150" in made.err
    listed = palm_jax("branch", "list", run, "--json").json["branches"]
    assert [b["branch"] for b in listed] == ["half"]
    shown = palm_jax("branch", "show", run, "half")
    assert "schedule.peak = 0.005" in shown.out
    assert palm_jax("replay", run / "branches/half", "--steps", "150:160").code == 0
    promoted = palm_jax("branch", "promote", run, "half", "--reason", "it heals", "--json")
    assert promoted.json["segment"] == 1
    changed = palm_jax(
        *("intervene", run, "--at", 155, "optimizer.clip_norm=0.5", "--exclude", "156:158"),
        *("--reason", "the norm | drifts", "--json"),
    )
    assert changed.code == 0, changed.err
    assert changed.json["changes"] == {"optimizer.clip_norm": [1.0, 0.5]}
    assert changed.json["recurring"]["excluded_positions"] == 32
    went_on = palm_jax("train", run / "config.yaml", "--run", run, "--json")
    assert (went_on.code, went_on.json["step"]) == (0, STEPS), went_on.err
    assert palm_jax("logbook", "note", run, "moved to the other rack").code == 0
    told = palm_jax("logbook", run)
    assert told.code == 0, told.err
    for words in ("it heals", "moved to the other rack", "clip_norm"):
        assert words in told.out
    assert palm_jax("logbook", run, "--json").json["segments"] == 3
    archive = run.parent / "incident.tar.gz"
    packed = palm_jax("bundle", run, "--steps", "152:160", "--out", archive)
    assert packed.code == 0, packed.err
    alone = palm_jax("replay", archive, "--steps", "152:160", "data.corpus=nowhere", "--json")
    assert (alone.code, alone.json["identical"]) == (0, True), alone.err
    then = palm_jax("data", "show", run, "--step", 157, "--json").json
    before = palm_jax("data", "show", run, "--step", 157, "--segment", 0, "--json").json
    assert then["first_position"] == before["first_position"] + 32


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


@pytest.mark.slow
def test_two_processes_end_in_the_digest_of_one(palm_jax, trained):
    command = (
        *("train", "small.yaml", "mesh.emulated_devices=8", "mesh.data=2", "mesh.fsdp=4"),
        *("--run", "runs/two", "--json"),
    )

    def both(*more: object) -> list[Done]:
        port = free_port()
        processes = [
            palm_jax.start(
                *command,
                *more,
                JAX_COORDINATOR_ADDRESS=f"localhost:{port}",
                PALM_JAX_NUM_PROCESSES=2,
                PALM_JAX_PROCESS_ID=index,
            )
            for index in range(2)
        ]
        return [finish(process) for process in processes]

    halfway = both("steps=30")  # and then they go on
    assert [done.code for done in halfway] == [0, 0], halfway[0].err
    for done in both():
        assert done.code == 0, done.err
        assert done.json == {**trained.json, "run": "runs/two"}
    once = steps_of(palm_jax.folder / "runs/straight")
    twice = steps_of(palm_jax.folder / "runs/two")
    assert [twice[s]["bits"] for s in range(STEPS)] == [once[s]["bits"] for s in range(STEPS)]
    one = ("mesh.emulated_devices=null", "mesh.data=1", "mesh.fsdp=1")
    assert palm_jax("replay", "runs/two", "--steps", "20:40", *one).code == 0
