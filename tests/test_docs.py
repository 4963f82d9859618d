"""What README and docs tell people to type exists, and the files they name are there."""

from __future__ import annotations

import json
import pathlib
import re
import shlex
import subprocess
import sys

import pytest
import typer.main

from palm_jax import cli, config

ROOT = pathlib.Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def commands(page: pathlib.Path) -> list[list[str]]:
    """The lines of a page's bash blocks, split into words, without comments."""
    blocks = re.findall(r"```bash\n(.*?)```", page.read_text(), re.DOTALL)
    lines = [shlex.split(line, comments=True) for block in blocks for line in block.splitlines()]
    return [words for words in lines if words]


ALL = [
    pytest.param(words, id=f"{page.name}: {' '.join(words)}")
    for page in PAGES
    for words in commands(page)
]


def test_pages_show_commands():
    assert len(ALL) >= 8


@pytest.mark.parametrize("words", ALL)
def test_command_in_the_docs_exists(words):
    if words[0] != "palm-jax":
        assert (ROOT / words[0]).stat().st_mode & 0o100
        return
    command, rest = typer.main.get_command(cli.app), words[1:]
    while hasattr(command, "commands"):
        command, rest = command.commands[rest[0]], rest[1:]
    # Parses options and arguments as a call would, and runs nothing.
    parameters = command.make_context(words[0], rest).params
    shipped = parameters.get("config_file")
    if shipped is not None and str(shipped).startswith("configs/"):
        config.load(ROOT / shipped, parameters.get("overrides") or ())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_files_named_in_a_page_exist(page):
    text = page.read_text()
    links = [link for link in re.findall(r"\]\(([^)]+)\)", text) if "://" not in link]
    named = re.findall(r"`((?:palm_jax|tests|configs|scripts|docs)/[\w./]+)`", text)
    for link in links:
        assert (page.parent / link).exists(), link
    for name in named:
        assert (ROOT / name).exists(), name


def prepare_corpus(folder: pathlib.Path) -> list[str]:
    """A folder in which the pages' commands run, and how they are called there."""
    (folder / "configs").symlink_to(ROOT / "configs")
    words = [sys.executable, "-m", "palm_jax.cli"]
    corpus = "data prepare --source stdlib --held-out 0.05 --sequence-length 256 --out runs/corpus"
    subprocess.run([*words, *corpus.split()], cwd=folder, check=True, capture_output=True)
    return words


@pytest.mark.slow
def test_the_history_of_interventions_goes_and_replays_as_the_page_says(tmp_path):
    words = prepare_corpus(tmp_path)
    shown = [
        rest
        for command, *rest in commands(ROOT / "docs/recipes.md")
        if "runs/history" in rest or "runs/history/config.yaml" in rest
    ]
    assert len(shown) == 8
    for rest in shown:
        done = subprocess.run([*words, *rest], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        if rest[0] == "replay":
            assert "identical: 10 steps" in done.stdout
    assert "| segments | 4 |" in done.stdout


@pytest.mark.slow
def test_what_eight_devices_did_replays_on_four_two_and_one_as_the_page_says(tmp_path):
    """Every command in a process of its own, typed as docs/bits.md has it."""
    words = prepare_corpus(tmp_path)
    shown = [rest for command, *rest in commands(ROOT / "docs/bits.md") if command == "palm-jax"]
    assert [rest[0] for rest in shown] == ["train", "replay", "replay", "replay"]
    for rest in shown:
        as_json = ["--json"] if rest[0] == "replay" else []
        done = subprocess.run(
            [*words, *rest, *as_json], cwd=tmp_path, check=True, capture_output=True, text=True
        )
        if as_json:
            answer = json.loads(done.stdout)
            assert answer["identical"] is True
            assert answer["compared_steps"] == 10
