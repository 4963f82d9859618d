"""What `lab underflow` counts, against loops and the lecture's numbers."""

from __future__ import annotations

import json
import math
import xml.etree.ElementTree as ElementTree

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from palm_jax import cli, config, train
from palm_jax.corpus.reader import Corpus
from palm_jax.lab import picture, snapshot, underflow
from palm_jax.record.folder import RunFolder

FINITE = st.floats(-(2.0**20), 2.0**20, width=32)


def by_format(rows, name):
    return [row for row in rows if row.format == name]


def test_gradient_elements_fall_where_the_formats_end():
    # 0 and 2^-24 by rounding; subnormal; normal; and an exact zero, which is left out.
    gradient = [np.float32([2.0**-25, 2.0**-24.5, 2.0**-20]), np.float32([[0.25, 0.0]])]
    (unscaled, scaled) = underflow.gradient_shares(gradient, ["float16"], [1.0, 2.0**16])
    assert (unscaled.zero, unscaled.subnormal, unscaled.overflow) == (0.25, 0.5, 0)
    assert (scaled.zero, scaled.subnormal, scaled.overflow) == (0, 0, 0)
    assert underflow.exact_zeros(gradient) == 0.2
    (row,) = underflow.gradient_shares(gradient, ["float16"], [2.0**19])
    assert row.overflow == 0.25
    assert math.isnan(row.error)


@given(st.lists(FINITE, min_size=1, max_size=20), st.sampled_from(["float16", "bfloat16", "E5M2"]))
def test_gradient_shares_are_those_of_a_loop(values, format):
    gradient = [np.float32(values)]
    (row,) = underflow.gradient_shares(gradient, [format], [4.0])
    kind = underflow.FORMATS[format]
    normal = float(ml_dtypes.finfo(kind).smallest_normal)
    kept = [v for v in gradient[0] if v != 0]
    counts = {"zero": 0, "subnormal": 0, "overflow": 0}
    for value in kept:
        with np.errstate(all="ignore"):
            held = float(kind(np.float32(value) * np.float32(4)))
        counts["zero"] += held == 0
        counts["subnormal"] += 0 < abs(held) < normal
        counts["overflow"] += not math.isfinite(held)
    for name, count in counts.items():
        assert getattr(row, name) == pytest.approx(count / max(len(kept), 1))


def test_updates_are_lost_below_half_a_spacing():
    weights = [np.float32([1.0, 0.05, -0.05, 0.0])]
    rows = {
        (r.format, r.size): r.share for r in underflow.unchanged(weights, sizes=[1e-3, 1e-4, 1e-5])
    }
    # At 1 the spacing of bfloat16 is 2^-7 above and 2^-8 below; at 0.05 it is 2^-12.
    assert rows["bfloat16", 1e-3] == 0.25
    assert rows["bfloat16", 1e-4] == 0.75
    assert rows["float16", 1e-4] == 0.25
    assert rows["float16", 1e-5] == 0.75
    assert rows["float32", 1e-5] == 0


def test_the_steps_own_update_counts_where_it_is_not_zero():
    weights, update = [np.float32([1.0, 1.0, 1.0])], [np.float32([0.0, 1e-3, 1e-2])]
    rows = underflow.unchanged(weights, update, ["bfloat16"], [])
    assert [(r.size, r.share) for r in rows] == [(None, 0.5)]


def test_sums_stall():
    rows = {row.format: row for row in underflow.repeated_sum()}
    assert rows["float32"].total == pytest.approx(1.0000535)
    assert rows["float32"].stalls_after is None
    assert (rows["float16"].total, rows["bfloat16"].total) == (0.25, 0.03125)
    assert rows["bfloat16"].stalls_after < rows["float16"].stalls_after < 10_000


@given(st.lists(FINITE, max_size=20))
def test_the_histogram_holds_every_element_that_is_not_zero(values):
    powers, shares = picture.histogram([np.float32(values)])
    sizes = [abs(float(v)) for v in np.float32(values) if v != 0]
    assert sum(shares) == pytest.approx(1 if sizes else 0)
    for power, share in zip(powers, shares, strict=True):
        inside = [v for v in sizes if 2.0**power <= v < 2.0 ** (power + 1)]
        assert share == pytest.approx(len(inside) / len(sizes))


@pytest.mark.parametrize("values", [[0.001, 0.5, -3.0], [0.0], [1e-30, 1e30]])
def test_the_picture_is_one_file_of_well_formed_xml(values):
    gradient = [np.float32(values)]
    with np.errstate(over="ignore"):
        shares = underflow.gradient_shares(gradient)
    text = picture.draw(gradient, shares, "a <run> & more")
    tree = ElementTree.fromstring(text)
    assert tree[0].text == "a <run> & more"
    assert "nan" not in text
    links = [v for node in tree.iter() for k, v in node.attrib.items() if "href" in k or k == "src"]
    assert not links


@pytest.fixture(scope="module")
def run(small, tmp_path_factory):
    settings = small(**{"data.ramp": {"sizes": [8]}, "steps": 4, "checkpoint.every": 2})
    path = tmp_path_factory.mktemp("lab") / "run"
    train.train(settings, path)
    return path


def test_a_snapshot_holds_the_gradient_and_update_of_its_step(run):
    """The logbook has the norms of both."""
    from palm_jax.record import logbook

    there = RunFolder(run)
    with Corpus.open(there.config().data.corpus) as corpus:
        moment = snapshot.take(there, corpus, there.config(), 3)
        newest = snapshot.take(there, corpus, there.config())
    assert (moment.step, newest.step) == (3, 4)
    records = {r["step"]: r["computed"] for r in logbook.read(run).records if r["event"] == "step"}
    squares = [np.square(g, dtype=np.float64).sum() for g in moment.gradient.values()]
    np.testing.assert_allclose(np.sqrt(sum(squares)), records[3]["gradient_norm"], rtol=1e-5)
    updates = np.concatenate([np.ravel(u) for u in moment.update.values()]).astype(np.float64)
    rms = np.sqrt(np.mean(updates**2))
    np.testing.assert_allclose(rms, records[3]["update_rms"], rtol=1e-3)
    weights = [np.square(w, dtype=np.float64).sum() for w in moment.weights.values()]
    np.testing.assert_allclose(np.sqrt(sum(weights)), records[3]["parameter_norm"], rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["float8"])
def test_a_snapshot_of_any_policy_has_the_gradient_of_float32(small, tmp_path, policy):
    settings = small(
        **{"data.ramp": {"sizes": [8]}, "steps": 1, "precision": {"policy": policy}, "mesh.fsdp": 2}
    )
    train.train(settings, tmp_path / "run")
    there = RunFolder(tmp_path / "run")
    with Corpus.open(settings.data.corpus) as corpus:
        moment = snapshot.take(there, corpus, settings, 0)
    assert (moment.loss_scale is not None) == (policy == "float16")
    assert all(g.dtype == np.float32 for g in moment.gradient.values())
    squares = [np.square(g, dtype=np.float64).sum() for g in moment.gradient.values()]
    assert np.isfinite(sum(squares))


@pytest.fixture
def in_process(monkeypatch):
    """The command, without the start of a process of its own."""
    monkeypatch.setattr("palm_jax.cli.lab.prepare_jax", lambda settings: None)
    return lambda *words: CliRunner().invoke(cli.app, ["lab", "underflow", *map(str, words)])


def test_the_command_prints_one_json_object_and_draws(run, in_process):
    done = in_process(run, "--step", 3, "--json")
    assert done.exit_code == 0, done.output
    answer = json.loads(done.stdout)
    assert answer["step"] == 3
    assert len(answer["gradient"]) == 3 * 17
    assert {row["format"] for row in answer["unchanged"]} == {"float32", "float16", "bfloat16"}
    assert ElementTree.parse(run / "reports" / "underflow.svg").getroot().tag.endswith("svg")


def test_the_command_tells_a_person(run, in_process, tmp_path):
    done = in_process(run, "--picture", tmp_path / "drawn.svg")
    assert done.exit_code == 0, done.output
    for words in ("before step 4", "2^16", "this step's", "10000 x 0.0001 in bfloat16: 0.03125"):
        assert words in done.stdout
    assert (tmp_path / "drawn.svg").is_file()


def test_settings_that_would_change_the_run_are_refused(run, in_process):
    done = in_process(run, "model.z_loss=0")
    assert isinstance(done.exception, config.WrongInput)
    assert "model.z_loss" in str(done.exception)
