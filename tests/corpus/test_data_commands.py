"""The commands that make and describe corpora, as a person calls them."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
import xml.etree.ElementTree

import pytest
from corpora import document

SOURCE = ("--source", "jsonl:*.jsonl")
DATA = ("--held-out", "0.3", "--sequence-length", "8")


@pytest.fixture
def place(tmp_path) -> pathlib.Path:
    lines = [document("train", 60, salt=n).decode() for n in range(6)]
    lines += [document("held_out", 60, salt=n).decode() for n in range(20)]
    for number in range(2):
        text = "".join(json.dumps({"text": line}) + "\n" for line in lines[number::2])
        (tmp_path / f"{number}.jsonl").write_text(text * 2)
    return tmp_path


def palm_jax(place: pathlib.Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "palm_jax.cli", "data", *map(str, arguments)],
        cwd=place,
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(pathlib.Path(__file__).parents[2]), "JAX_PLATFORMS": "cpu"},
    )


def test_parts_are_made_and_merged_into_what_one_command_makes(place):
    jsonl = ("--source", "jsonl:*.jsonl", *DATA, "--drop-duplicates")
    alone = palm_jax(place, "prepare", *jsonl, "--out", "alone")
    assert alone.returncode == 0, alone.stderr
    assert "exact copies: 26 dropped, 0 kept" in alone.stdout
    assert "on disk this takes about" in alone.stderr
    for number in range(2):
        done = palm_jax(place, "prepare", *jsonl, "--shard", f"{number}/2", "--out", f"p{number}")
        assert done.stdout.startswith(f"p{number}: part {number}/2 of a corpus, 26 documents")
    merged = palm_jax(place, "merge", "p0", "p1", "--out", "merged", "--json")
    there = {path.name: path.read_bytes() for path in (place / "alone").iterdir()}
    assert {path.name: path.read_bytes() for path in (place / "merged").iterdir()} == there
    assert json.loads(merged.stdout)["duplicates_dropped"] == 26


def test_statistics_are_shown_drawn_and_given_as_json(place):
    palm_jax(place, "prepare", "--source", "jsonl:*.jsonl", *DATA, "--out", "corpus")
    shown = palm_jax(place, "stats", "corpus", "--picture", "corpus.svg")
    assert shown.returncode == 0, shown.stderr
    assert "documents of train by their tokens" in shown.stdout
    assert "held out of corpus and in the split train of corpus: 0 documents" in shown.stdout
    xml.etree.ElementTree.parse(place / "corpus.svg")
    told = json.loads(palm_jax(place, "stats", "corpus", "--json").stdout)
    splits = told["corpora"]["corpus"]["splits"]
    assert sum(split["documents"] for split in splits.values()) == 52
    assert sum(split["copies"] for split in splits.values()) == 26


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["prepare", *SOURCE, "--shard", "2", "--out", "x"], "is not I/N"),
        (["prepare", *SOURCE, "--shard", "2/2", "--out", "x"], "shard=2/2"),
        (["prepare", "--source", "csv:a", "--out", "x"], "there are: stdlib, text:GLOB, jsonl:"),
        (
            ["prepare", *SOURCE, "--tokenizer", "words", "--out", "x"],
            "there are: bytes, sentencepiece:FILE",
        ),
        (
            ["prepare", *SOURCE, "--tokenizer", "sentencepiece:train:many", "--out", "x"],
            "'many' is no number of ids",
        ),
        (["merge", "0.jsonl", "--out", "x"], "0.jsonl is no part of a corpus"),
        (["stats", "nowhere"], "nowhere is not a folder"),
        (["stats", "a", "b", "--picture", "c.svg"], "is of one corpus, and 2 are named"),
    ],
)
def test_wrong_input_is_one_message_and_leaves_nothing(place, arguments, said):
    before = sorted(place.iterdir())
    done = palm_jax(place, *arguments)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert sorted(place.iterdir()) == before
