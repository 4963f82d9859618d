"""The page of a run: what it says, that nothing of the run can break it, and what it costs."""

from __future__ import annotations

import base64
import hashlib
import html.parser
import json
import math
import os
import pathlib
import re
import time
from typing import Any

import books
import numpy as np
import pytest
import typer.testing
from runs import StopAfter

from palm_jax import cli, report
from palm_jax.errors import CannotDo, WrongInput
from palm_jax.record import chronicle
from palm_jax.record.folder import RunFolder
from palm_jax.record.segments import Departure, Segment
from palm_jax.replay import branches
from palm_jax.train import train

DTYPES = {"i4": "<i4", "u1": "u1", "f4": "<f4", "f8": "<f8"}


class Page(html.parser.HTMLParser):
    """A page taken apart: its scripts, elements and text."""

    def __init__(self, path: pathlib.Path) -> None:
        super().__init__()
        self.raw = path.read_text(encoding="utf-8")
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.text = ""
        self._inside = ""
        self.feed(self.raw)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside = tag
        if tag == "script":
            self.scripts.append((dict(attrs), ""))

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            self.scripts[-1] = self.scripts[-1][0], self.scripts[-1][1] + data
        elif self._inside != "style":
            self.text += data

    @property
    def data(self) -> dict[str, Any]:
        """What the figures show, read as strict JSON."""

        def refuse(token: str) -> Any:
            raise ValueError(token)

        (text,) = (t for attrs, t in self.scripts if attrs.get("type") == "application/json")
        return json.loads(text, parse_constant=refuse)

    def panel(self, title: str, kind: str = "line") -> dict[str, Any]:
        (found,) = (p for p in self.data["panels"] if (p["title"], p["kind"]) == (title, kind))
        return found

    def points(self, title: str, role: str = "present") -> dict[int, float]:
        """{step: value} of a series; a step that is there twice is an error."""
        (series,) = (s for s in self.panel(title)["series"] if s["role"] == role)
        steps, values = decoded(series["x"]).tolist(), decoded(series["y"]).tolist()
        assert len(set(steps)) == len(steps), "a step is there twice"
        return dict(zip(steps, values, strict=True))

    def marks(self, kind: str) -> list[tuple[int, int, str]]:
        return [tuple(m) for group in self.data["marks"] if group["kind"] == kind
                for m in group["marks"]]  # fmt: skip


def decoded(packed: dict[str, str]) -> np.ndarray:
    return np.frombuffer(base64.b64decode(packed["data"]), DTYPES[packed["type"]])


def made(run: pathlib.Path, **options: Any) -> tuple[Page, dict[str, Any]]:
    path, numbers = report.write(run, **options)
    return Page(path), numbers


# --- a run that was trained ---


@pytest.fixture(scope="module")
def rolled_back(small, tmp_path_factory) -> pathlib.Path:
    """Reaches step 10, is rolled back to 6, and reaches 12. Batches of 8."""
    run = tmp_path_factory.mktemp("report") / "run"
    every = {"checkpoint.every": 2, "log.every": 1, "eval.every": 4, "data.ramp": {"sizes": [8]}}
    train(small(steps=12, **every), run, stop_requested=StopAfter(9))
    branches.intervene(
        RunFolder(run), 6, branches.Changes(overrides=("schedule.peak=0.005",)), "a <spike> & more"
    )
    train(small(steps=12, **every), run)
    branches.create_branch(RunFolder(run), 8, branches.Changes(), name="beside")
    return run


def test_after_a_rollback_each_step_is_there_once_with_its_last_value(rolled_back):
    page, numbers = made(rolled_back)
    records = [
        json.loads(line)
        for part in sorted((rolled_back / "logbook").iterdir())
        for line in part.read_text().splitlines()
    ]
    last: dict[int, Any] = {}
    for record in records:
        if record["event"] == "step":
            last[record["step"]] = record
    assert sum(record["event"] == "step" for record in records) == 10 + 6
    assert page.points("loss") == {step: r["computed"]["loss"] for step, r in last.items()}
    assert sorted(last) == list(range(12))
    assert (numbers["steps"], numbers["attempts"], numbers["steps_left_behind"]) == (12, 16, 4)
    assert numbers["tokens"] == 12 * 8 * 8  # sequences of 8
    assert numbers["loss"] == last[11]["computed"]["loss"]
    assert numbers["steps"] == chronicle.summary(rolled_back)["steps_made"]
    ((first, _, label),) = page.marks("rollback")
    assert (first, label) == (6, "rolled back from step 10 to 6, segment 1")
    left = {
        s: r for r in records if r["event"] == "step" and r["segment"] == 0 for s in [r["step"]]
    }
    wanted = {step: r["computed"]["loss"] for step, r in left.items() if step >= 6}
    assert page.points("loss", "abandoned") == wanted


def test_the_page_has_what_a_reader_looks_for_first(rolled_back):
    page, numbers = made(rolled_back)
    stop = json.loads(sorted((rolled_back / "logbook").iterdir())[-1].read_text().splitlines()[-1])
    assert numbers["state_digest"] == stop["state_digest"]
    assert numbers["status"] == "finished at step 12"
    evaluations = page.points("loss", "held_out")
    assert sorted(evaluations) == [4, 8, 12]
    assert numbers["held_out_loss"] == evaluations[12]
    for words in (
        numbers["state_digest"],
        f"{numbers['parameters']:,}",
        f"{numbers['bits_per_byte']:.5g}",
        "no incidents",
        "finished at step 12",
        "a <spike> & more",
        "intervention; segment 1 begins at step 6",
        "schedule.peak = 0.005 from step 6",
        "segment 0, before step 6",
        "num_layers: 2",
        "beside",
        "device_kind",
    ):
        assert words in page.text, words
    titles = {panel["title"] for panel in page.data["panels"]}
    assert {"cross entropy", "z loss", "gradient norm", "tokens per second"} <= titles
    assert {"held out bits per byte", "held out loss above training"} <= titles


def test_an_earlier_segment_shows_the_history_that_ends_in_it(rolled_back, tmp_path):
    page, numbers = made(rolled_back, segment=0, out=tmp_path / "old.html")
    assert (numbers["steps"], numbers["segment"]) == (10, 0)
    assert sorted(page.points("loss")) == list(range(10))
    with pytest.raises(WrongInput, match=r"--segment 2: .* has segments 0 to 1"):
        report.write(rolled_back, segment=2)


# --- runs that were made up ---


def test_a_branch_is_listed_and_has_a_report_of_its_own(tmp_path):
    run = books.write(tmp_path / "run", books.steps(0, 12))
    departed = Segment(parent=Departure(run="../..", segment=0, step=8), start_step=8, reason="why")
    branch = books.write(run / "branches" / "b1", books.steps(8, 10), segments=(departed,))
    page, numbers = made(branch)
    assert sorted(page.points("loss")) == [8, 9]
    assert numbers["tokens"] == 10 * 64
    page, _ = made(run)
    row = "b1</td><td>segment 0, before step 8</td><td>why</td>"
    number = '<td class="number">'
    assert f"{row}{number}2</td>{number}9</td><td>4.1</td>" in page.raw


def test_losses_that_are_not_finite_stay_visible_and_the_json_strict(tmp_path):
    records = books.steps(0, 20)
    for number, value in {3: "nan", 4: "nan", 9: "inf", 19: "-inf"}.items():
        records[number]["computed"]["loss"] = value
    page, numbers = made(books.write(tmp_path / "run", [books.start(0, 0), *records]))
    assert page.panel("loss")["bad"] == [[3, 4, 2, "nan"], [9, 9, 1, "inf"], [19, 19, 1, "-inf"]]
    shown = page.points("loss")
    assert {s for s, value in shown.items() if not math.isfinite(value)} == {3, 4, 9, 19}
    assert numbers["loss"] == -math.inf
    assert numbers["non_finite_losses"] == 4
    assert "4 losses not finite" in page.text
    assert "4 not finite" in page.text


def test_a_loss_that_never_was_finite_makes_a_page_too(tmp_path):
    page, _ = made(books.write(tmp_path / "run", books.steps(0, 5, loss="nan")))
    assert page.panel("loss")["bad"] == [[0, 4, 5, "nan"]]


def test_vitals_that_never_change_are_told_and_not_drawn(tmp_path):
    page, _ = made(books.write(tmp_path / "run", books.steps(0, 5)))
    titles = [panel["title"] for panel in page.data["panels"]]
    assert "rate scale" not in titles
    assert "skip above" not in titles
    assert "<th>rate scale</th><td>1</td>" in page.raw
    assert "<th>skip above</th><td>inf</td>" in page.raw


def test_a_limit_that_is_off_for_a_while_is_no_value_to_warn_of(tmp_path):
    records = [*books.steps(0, 5), *books.steps(5, 9, skip_above=2.5)]
    page, _ = made(books.write(tmp_path / "run", records))
    assert page.panel("skip above")["bad"] == []


def test_vitals_of_layers_become_heat_maps_and_a_logbook_without_them_a_page(tmp_path):
    def layers(number: int) -> dict[str, Any]:
        return {"layers/update_rms": [0.5, float(number), "nan" if number == 2 else -1.0]}

    with_them = [books.step(number, **layers(number)) for number in range(4)]
    page, _ = made(books.write(tmp_path / "new", with_them))
    panel = page.panel("update rms", "heat")
    assert (panel["layers"], panel["num_bad"]) == (3, 1)
    assert decoded(panel["x"]).tolist() == [0, 1, 2, 3, 4]
    wanted = [[0.5, 0, -1], [0.5, 1, -1], [0.5, 2, math.nan], [0.5, 3, -1]]
    assert decoded(panel["z"]).tobytes() == np.array(wanted, "<f4").tobytes()
    assert decoded(panel["bad"]).reshape(4, 3).tolist()[2] == [0, 0, 1]
    page, _ = made(books.write(tmp_path / "old", books.steps(0, 4)))
    assert {panel["kind"] for panel in page.data["panels"]} == {"line"}


def test_an_incident_is_marked_from_its_onset_to_its_end_and_open_ones_are_counted(tmp_path):
    jump = {"segment": 0, "kind": "jump", "onset": 6, "detected": 7, "vital": "loss"}
    drift = {"segment": 0, "kind": "drift", "onset": 12, "detected": 15, "vital": "loss"}
    records = [
        *books.steps(0, 8),
        books.event("incident", **jump, step=7),
        *books.steps(8, 10),
        books.event("incident_closed", **jump, step=9, closed=9, outcome="recovered"),
        books.event("alarm", segment=0, step=9, vital="gradient_norm", value=1.0, why="too high"),
        *books.steps(10, 16),
        books.event("incident", **drift, step=15),
    ]
    page, numbers = made(books.write(tmp_path / "run", records))
    assert page.marks("incident") == [
        (6, 9, "incident: jump of loss, at step 6, segment 0; recovered at step 9"),
        (12, 12, "incident: drift of loss, at step 12, segment 0"),
    ]
    assert page.marks("alarm") == [(9, 9, "alarm: gradient_norm, too high")]
    assert (numbers["incidents"], numbers["open_incidents"]) == (2, 1)
    assert "2 incidents, 1 not closed" in page.text
    assert "incident: jump of loss, at step 6, segment 0" in page.text


def test_an_open_incident_that_was_rolled_back_is_not_open_any_more(tmp_path):
    first = [*books.steps(0, 8), books.event("incident", segment=0, step=7, kind="jump", onset=6)]
    second = [books.event("intervention", segment=1, from_step=4, reason="x", changes={})]
    departed = Segment(segment=1, parent=Departure(segment=0, step=4), start_step=4)
    run = books.write(tmp_path / "run", first, second, segments=(Segment(), departed))
    page, numbers = made(run)
    assert (numbers["incidents"], numbers["open_incidents"]) == (1, 0)
    assert numbers["status"] == "segment 1 opened at step 4, not gone on yet"
    assert page.marks("incident")[0][0] == 6


@pytest.mark.parametrize(
    ("exclusion", "at"),
    [((40, 56), 5), ((44, 60), 5), ((41, 42), 5), ((160, 176), None), ((8, 16), 1)],
)
def test_an_exclusion_is_marked_where_the_data_jumps_over_it(tmp_path, exclusion, at):
    start, stop = exclusion

    def position(index: int) -> int:
        return index if index < start else index + stop - start

    records = [books.step(n, first_position=position(8 * n)) for n in range(10)]
    segment = Segment(exclusions=(exclusion,))
    page, _ = made(books.write(tmp_path / "run", records, segments=(segment,)))
    assert [mark[0] for mark in page.marks("exclusion")] == ([] if at is None else [at])


def test_a_batch_that_grows_is_marked(tmp_path):
    records = [*books.steps(0, 5), *books.steps(5, 9, batch_size=16)]
    page, _ = made(books.write(tmp_path / "run", records))
    assert page.marks("ramp") == [(5, 5, "batch of 16 sequences from step 5")]


def test_a_crash_is_marked_where_the_run_went_on_and_counts_no_token_twice(tmp_path):
    first, second = books.steps(0, 9), books.steps(6, 12, attempt=2)
    run = books.write(tmp_path / "run", [books.start(0, 0), *first], [books.start(0, 6), *second])
    page, numbers = made(run)
    assert [mark[0] for mark in page.marks("resumed")] == [6]
    assert sorted(page.points("loss")) == list(range(12))
    assert (numbers["tokens"], numbers["attempts"], numbers["steps_redone"]) == (12 * 64, 15, 3)


def test_skipped_updates_are_marked(tmp_path):
    records = [*books.steps(0, 3), *books.steps(3, 5, applied=False), *books.steps(5, 9)]
    page, numbers = made(books.write(tmp_path / "run", records))
    assert page.marks("skipped") == [(3, 4, "update skipped, steps 3 to 4")]
    assert numbers["skipped_updates"] == 2


def test_tokens_count_batches_and_not_the_data_that_was_jumped_over(tmp_path):
    # From step 5 on, the data of ten steps later: the logbook's own count jumps, too.
    records = [*books.steps(0, 5), *(books.step(n, tokens=64 * (n + 11)) for n in range(5, 8))]
    _, numbers = made(books.write(tmp_path / "run", records))
    assert numbers["tokens"] == 8 * 64


def test_a_run_without_a_step_has_a_page(tmp_path):
    page, numbers = made(books.write(tmp_path / "run", [books.start(0, 0)]))
    assert (numbers["steps"], numbers["loss"], numbers["tokens"]) == (0, None, None)
    assert page.data["panels"] == []
    assert "running, or died without a stop" in page.text


def test_nothing_of_the_run_is_obeyed_as_html_or_script(tmp_path):
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\u2028<!--"
    records = [
        books.start(0, 0, environment={evil: evil}, signal=evil),
        *(books.step(n, **{evil: float(n), f"layers/{evil}": [float(n)]}) for n in range(3)),
        books.event("note", text=evil),
        books.event("incident", segment=0, step=2, kind=evil, vital=evil),
        books.event(evil, text="[a](javascript:alert(3)) ![b](http://example.com/c.png)"),
        books.event("evaluation", segment=0, step=2, split=evil, loss=1.0),
        books.event("checkpoint", segment=0, step=3, state_digest=evil),
        books.event("stop", segment=0, step=3, signal=evil),
    ]
    segment = Segment(reason=evil, exclusions=((0, 1),))
    run = books.write(tmp_path / "<b>&\"'run", records, segments=(segment,))
    page, _ = made(run)
    # Python's parser ends a script only at its end tag, like a browser.
    assert [attrs for attrs, _ in page.scripts] == [
        {"type": "application/json", "id": "report-data"},
        {},
        {},
    ]
    assert not any(tag in ("img", "b", "a", "iframe") for tag, _ in page.tags)
    assert not any(name.startswith("on") for _, attrs in page.tags for name in attrs)
    assert not re.search(r"<!--|</script><script>alert", page.raw.split("<script", 1)[0])
    assert page.text.count("</script><script>alert(1)</script>") >= 5
    assert page.data["name"] == "<b>&\"'run"


def test_the_page_names_no_address_outside_its_scripts_and_allows_no_others(tmp_path):
    page, _ = made(books.write(tmp_path / "run", books.steps(0, 3)))
    without = re.sub(r"<script>.*?</script>", "", page.raw, flags=re.DOTALL)
    assert "://" not in without
    assert not any("src" in attrs or "href" in attrs for _, attrs in page.tags)
    (policy,) = (a["content"] for _, a in page.tags if "http-equiv" in a)
    assert policy is not None
    assert "default-src 'none'" in policy
    for attrs, text in page.scripts:
        if not attrs:
            digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
            assert f"'sha256-{digest}'" in policy


def test_a_damaged_run_is_an_error_that_names_the_place_and_leaves_no_page(tmp_path):
    run = books.write(tmp_path / "run", books.steps(0, 3))
    part = run / "logbook" / "0000.jsonl"
    part.write_text("{}\n" + part.read_text())
    with pytest.raises(CannotDo, match=r"0000\.jsonl, line 1"):
        report.write(run)
    runner = typer.testing.CliRunner()
    refused = runner.invoke(cli.app, ["report", str(run)])
    assert isinstance(refused.exception, CannotDo)
    assert not (run / "reports").exists()
    (books.write(tmp_path / "other", []) / "segments" / "000" / "segment.json").unlink()
    with pytest.raises(CannotDo, match=r"segment 0 has no segment\.json"):
        report.write(tmp_path / "other")
    with pytest.raises(WrongInput, match="not a run's folder"):
        report.write(tmp_path)


def test_the_command_writes_the_file_and_prints_one_json_object(tmp_path):
    run = books.write(tmp_path / "run", [*books.steps(0, 3, loss="nan")])
    out = tmp_path / "deep" / "page.html"
    done = typer.testing.CliRunner().invoke(
        cli.app, ["report", str(run), "--out", str(out), "--json"]
    )
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert (told["report"], told["bytes"]) == (str(out), out.stat().st_size)
    assert (told["steps"], told["loss"], told["run"]) == (3, "nan", str(run))
    assert os.listdir(out.parent) == ["page.html"]
    plain = typer.testing.CliRunner().invoke(cli.app, ["report", str(run)])
    assert plain.stdout.startswith(f"{run}/reports/report.html: 3 steps, ")
    with pytest.raises(WrongInput, match="is a folder"):
        report.write(run, out=tmp_path)


def test_a_long_run_is_thinned_and_read_in_seconds(tmp_path):
    run = books.lively(tmp_path / "run", 12_000, 8, every=4)
    began = time.perf_counter()
    page, _ = made(run)
    assert time.perf_counter() - began < 15
    assert len(page.raw) < 8e6
    for panel in page.data["panels"]:
        for series in panel.get("series", ()):
            assert len(decoded(series["x"])) <= 4100
    bad = page.panel("loss")["bad"]
    shown = page.points("loss")
    assert {s for s, value in shown.items() if not math.isfinite(value)} == {
        step for first, last, _, _ in bad for step in range(first, last + 1)
    }
