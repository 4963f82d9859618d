"""What README and docs tell people to type exists, and the files they name are there."""

from __future__ import annotations

import pathlib
import re
import shlex

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
    if (shipped := parameters.get("config_file")) is not None and "RUN" not in str(shipped):
        config.load(ROOT / shipped, parameters["overrides"] or ())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_files_named_in_a_page_exist(page):
    text = page.read_text()
    links = [link for link in re.findall(r"\]\(([^)]+)\)", text) if "://" not in link]
    named = re.findall(r"`((?:palm_jax|tests|configs|scripts|docs)/[\w./]+)`", text)
    for link in links:
        assert (page.parent / link).exists(), link
    for name in named:
        assert (ROOT / name).exists(), name
