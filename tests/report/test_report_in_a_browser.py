"""The page in a real browser: every panel is drawn, nothing is complained of, nothing fetched."""

from __future__ import annotations

import json
import pathlib
import re
import shutil
import subprocess
import urllib.parse

import books
import pytest

from palm_jax import report

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next((name for name in BROWSERS if shutil.which(name)), None)
pytestmark = pytest.mark.skipif(
    BROWSER is None, reason=f"none of {', '.join(BROWSERS)} is installed"
)
# Where the browser itself calls home, whatever page it shows.
OF_THE_BROWSER = ("google.com", "googleapis.com", "gstatic.com", "gvt1.com")


class Shown:
    """A page after its scripts have run."""

    def __init__(self, page: pathlib.Path, folder: pathlib.Path) -> None:
        assert BROWSER is not None
        log = folder / "net.json"
        done = subprocess.run(
            [
                *(BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run"),
                *("--disable-background-networking", "--disable-sync", "--window-size=1200,900"),
                *("--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={folder / 'profile'}"),
                *("--enable-logging=stderr", f"--log-net-log={log}", "--virtual-time-budget=30000"),
                *("--dump-dom", page.as_uri()),
            ],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        self.dom = done.stdout
        self.complaints = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
        events = json.loads(log.read_text())["events"]
        addresses = {e["params"]["url"] for e in events if "url" in e.get("params", {})}
        hosts = {urllib.parse.urlsplit(address).hostname for address in addresses}
        self.hosts = {host for host in hosts if host and not host.endswith(OF_THE_BROWSER)}


@pytest.fixture(scope="module")
def shown(tmp_path_factory) -> Shown:
    folder = tmp_path_factory.mktemp("browser")
    path, _ = report.write(books.lively(folder / "run <b> & co", 1500, 3))
    return Shown(path, folder)


def test_every_panel_is_drawn(shown):
    opening = re.search(r"<html[^>]*>", shown.dom)
    assert opening is not None
    assert 'data-ready="yes"' in opening[0]
    num_panels = len(re.findall(r'<figure class="panel', shown.dom))
    assert num_panels > 20
    assert f'data-drawn="{num_panels}"' in opening[0]
    # Of Plotly: curves are paths, heat maps are pictures.
    assert len(re.findall(r'class="js-line"', shown.dom)) > num_panels
    assert len(re.findall(r"<image[^>]* (?:xlink:)?href=\"data:image/png", shown.dom)) >= 8


def test_the_browser_has_nothing_to_complain_of(shown):
    assert shown.complaints == []


def test_nothing_is_fetched(shown):
    assert shown.hosts == set()


def test_a_run_without_a_step_and_one_of_a_single_step_open_too(tmp_path):
    for number, records in enumerate(([], books.steps(0, 1))):
        path, _ = report.write(books.write(tmp_path / f"run{number}", records))
        found = Shown(path, tmp_path)
        assert found.complaints == []
        assert 'data-ready="yes"' in found.dom
