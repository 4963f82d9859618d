"""`palm-jax generate` on a run, as a person or a script meets it."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from palm_jax import cli, sharding, step, train
from palm_jax.corpus.reader import Corpus
from palm_jax.errors import WrongInput
from palm_jax.record import folder, segments
from palm_jax.record.checkpoints import Checkpoints
from palm_jax.record.folder import RunFolder
from palm_jax.use import decode, trained

PROMPT = ("--prompt", "the")


SETTINGS = {"data.ramp": {"sizes": [8]}, "steps": 4, "checkpoint.every": 2}


@pytest.fixture(scope="module")
def run(small, tmp_path_factory):
    """The folder of a run that reads 8 tokens, with checkpoint 4 of some parameters.

    Nothing of it was trained, which takes a minute of compiling.
    """
    settings = small(**SETTINGS)
    there = RunFolder(tmp_path_factory.mktemp("generate") / "run")
    with Corpus.open(settings.data.corpus) as corpus:
        folder.create(there, settings, corpus.manifest, segments.Segment())
    program = step.make_program(settings, sharding.make_mesh(settings.mesh), 256)
    with Checkpoints(there.checkpoints(0), settings.checkpoint) as saved:
        saved.save(4, program.init(), {}, None)
    return there.path


@pytest.fixture(scope="module")
def compiled_once():
    """A decoder for each way of calling it; where the corpus lies is not compiled."""
    made: dict[Any, decode.Decoder] = {}

    def make_decoder(settings, mesh, *more):
        key = settings.model_dump_json(exclude={"data", "steps"}), mesh, more
        if key not in made:
            made[key] = afresh(settings, mesh, *more)
        return made[key]

    afresh = decode.make_decoder
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode, "make_decoder", make_decoder)
        yield


@pytest.fixture
def call(monkeypatch, run, compiled_once):
    """The command, without the start of a process of its own."""
    monkeypatch.setattr("palm_jax.cli.generate.prepare_jax", lambda settings: None)

    def invoke(*words: object, of: pathlib.Path = run):
        return CliRunner().invoke(cli.app, ["generate", *map(str, (of, *words))])

    return invoke


def refusal(done) -> str:
    assert isinstance(done.exception, WrongInput), done.output
    return str(done.exception)


def test_the_command_prints_one_json_object(run, call):
    done = call(*PROMPT, "--max-tokens", 5, "--json")
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)
    assert (said["step"], said["segment"], said["prompt_tokens"]) == (4, 0, 4)
    assert len(said["tokens"]) == len(said["logprobs"]) <= 5
    content = bytes(token for token in said["tokens"] if token < 256)
    assert said["text"] == content.decode("utf-8", errors="replace")
    assert all(logprob < 0 for logprob in said["logprobs"])
    assert said["tokens_per_second"] > 0
    # Two layers, keys and values, 9 tokens in whole chunks of 8, one head of 8 in float32.
    assert said["cache_bytes"] == 2 * 2 * 16 * 8 * 4


def test_rows_of_a_batch_are_those_that_the_command_prints_alone(run, call, tmp_path):
    (tmp_path / "prompts.txt").write_bytes(b"the\na \xff b\n\n")
    (tmp_path / "prompts.jsonl").write_text('"the"\n{"prompt": "a b", "id": 7}\n"x\\ny"\n')
    alone = json.loads(call(*PROMPT, "--json").stdout)
    lines = json.loads(call("--batch", tmp_path / "prompts.txt", "--json").stdout)
    objects = json.loads(call("--batch", tmp_path / "prompts.jsonl", "--json").stdout)
    for rows in (lines["rows"], objects["rows"]):
        assert rows[0].items() <= alone.items()
    assert [row["prompt_tokens"] for row in lines["rows"]] == [4, 6, 1]
    assert [row["prompt_tokens"] for row in objects["rows"]] == [4, 4, 4]
    plain = call("--batch", tmp_path / "prompts.txt")
    assert plain.stdout.startswith(f"--- 0\nthe{alone['text']}\n--- 1\na \ufffd b")


def test_a_run_of_bytes_needs_no_corpus_but_for_steps_without_a_checkpoint(run, call):
    told = "data.corpus=elsewhere"
    wanted = json.loads(call(*PROMPT, "--json").stdout)
    found = json.loads(call(told, *PROMPT, "--json").stdout)
    assert (found["tokens"], found["logprobs"]) == (wanted["tokens"], wanted["logprobs"])
    missing = "elsewhere, which the steps up to it read, is not there"
    assert missing in refusal(call(told, *PROMPT, "--step", 3))


@pytest.mark.slow
def test_a_step_without_a_sound_checkpoint_is_computed(small, call, tmp_path):
    train.train(small(**SETTINGS), tmp_path / "run")
    there = RunFolder(tmp_path / "run")
    before, at, after = (
        np.asarray(trained.load(there, there.config(), number).params["embedding_VD"])
        for number in (2, 3, 4)
    )
    assert not np.array_equal(before, at)
    assert not np.array_equal(at, after)
    assert json.loads(call(*PROMPT, "--step", 3, "--json", of=there.path).stdout)["step"] == 3
    wanted = call(*PROMPT, "--json", of=there.path)
    for part in (there.checkpoints(0) / "4" / "record").rglob("*"):
        if part.is_file():
            part.write_bytes(b"{}")
    done = call(*PROMPT, "--json", of=there.path)
    assert "checkpoint 4" in done.stderr
    assert "is damaged" in done.stderr
    assert json.loads(done.stdout)["logprobs"] == json.loads(wanted.stdout)["logprobs"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ((), "give either --prompt TEXT or --batch FILE"),
        ((*PROMPT, "--batch", "x"), "give either --prompt TEXT or --batch FILE"),
        (("--batch", "no-such-file"), "cannot read --batch no-such-file"),
        (("--prompt", "x" * 40), "--prompt has 41 tokens"),
        ((*PROMPT, "--max-tokens", 6), "ask for 5 at most"),
        ((*PROMPT, "--temperature", -1), "--temperature -1"),
        ((*PROMPT, "--top-p", 0), "--top-p 0"),
        ((*PROMPT, "--step", 9), "--step 9"),
        ((*PROMPT, "model.width=32"), "model.width would change"),
    ],
)
def test_what_cannot_be_is_refused_by_name(call, words, told):
    assert told in refusal(call(*words))


@pytest.mark.parametrize(
    ("line", "told"),
    [("{", "line 2 is no JSON"), ("[1]", "line 2 must be a JSON string"), ("7", "line 2 must")],
)
def test_lines_that_are_no_prompts_are_refused_by_number(call, tmp_path, line, told):
    (tmp_path / "prompts.jsonl").write_text(f'"the"\n{line}\n')
    assert told in refusal(call("--batch", tmp_path / "prompts.jsonl"))
