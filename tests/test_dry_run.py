"""What `train --dry-run` says of mesh and memory, without the devices."""

from __future__ import annotations

import json
import pathlib

import pytest
import typer.testing

from palm_jax import cli, meeting
from palm_jax.errors import WrongInput

CONFIGS = pathlib.Path(__file__).parents[1] / "configs"


def said(config_name: str, *arguments: str) -> str:
    command = ["train", str(CONFIGS / f"{config_name}.yaml"), "data.corpus=absent", "--dry-run"]
    done = typer.testing.CliRunner().invoke(cli.app, [*command, *arguments])
    if done.exception is not None:
        raise done.exception
    return done.output


def table(text: str, first: str) -> list[list[str]]:
    """Rows of the table whose heading begins so; cells have two spaces between them."""
    lines = text.splitlines()
    begin = next(i for i, line in enumerate(lines) if line.startswith(f"  {first}"))
    rows = []
    for line in lines[begin:]:
        if not line.startswith("  "):
            break
        rows.append([cell.strip() for cell in line.strip().split("  ") if cell.strip()])
    return rows


def test_mesh_is_shown_with_what_each_axis_cuts():
    text = said("palm_540b")
    assert "mesh: data 2 x fsdp 256 x tensor 12 = 6,144 devices\n" in text
    assert table(text, "axis")[1:] == [
        ["data x fsdp", "512", "batch", "2,048", "4"],
        ["fsdp", "256", "width", "18,432", "72"],
        ["tensor", "12", "heads", "48", "4"],
        ["tensor", "12", "feed-forward", "73,728", "6,144"],
        ["tensor", "12", "vocabulary", "256,512", "21,376"],
    ]


def test_bytes_of_a_device_are_shown_by_group_and_kind():
    rows = table(said("palm_540b"), "on each device")
    assert rows[0] == ["on each device", "parameters", "momentum", "second moment", "gradient"]
    # 21,376 rows of the table x 72; three kernels of 72 x 6,144 in 118 layers.
    expected = {
        "embedding": f"{21376 * 72 * 4 / 2**20:.1f} MiB",
        "feed-forward": f"{118 * 3 * 72 * 6144 * 4 / 2**20:.1f} MiB",
        "norms": f"{118 * 72 * 4 / 2**10:.1f} KiB",
    }
    shown = {row[0]: row[1:] for row in rows[1:]}
    assert list(shown) == ["embedding", "attention", "feed-forward", "norms", "sum"]
    assert {group: shown[group] for group in expected} == {
        group: [size] * 4 for group, size in expected.items()
    }


@pytest.mark.parametrize("name", ["tiny", "palm_8b", "palm_540b"])
def test_json_has_the_same_numbers_and_they_add_up(name):
    object_ = json.loads(said(name, "--json"))
    mesh, of_device = object_["mesh"], object_["device_bytes"]
    assert mesh["devices"] == mesh["data"] * mesh["fsdp"] * mesh["tensor"]
    assert mesh["processes"] is None
    kept = [of_device[kind] for kind in ("parameters", "momentum", "second_moment")]
    state = sum(sum(groups.values()) for groups in kept) + of_device["counters"]
    assert of_device["state"] == state
    rest = sum(of_device["gradient"].values()) + of_device["batch"] + of_device["controls"]
    assert of_device["total"] == state + rest
    # What tensor-parallel devices all have (keys, values, norms) makes the sum larger.
    copies = of_device["state"] * mesh["devices"] / (object_["state_bytes"] * mesh["data"])
    assert 1 <= copies < 1.05
    in_mib = f"{sum(kept[0].values()) / 2**20:.1f} MiB"
    if name != "tiny":
        assert table(said(name), "on each device")[-1][1:] == [in_mib] * 4


def test_processes_are_shown_where_they_are_known(monkeypatch):
    monkeypatch.setenv(meeting.NUM_PROCESSES, "1536")
    assert "= 6,144 devices, 4 in each of 1,536 processes\n" in said("palm_540b")
    assert json.loads(said("palm_540b", "--json"))["mesh"]["processes"] == 1536


@pytest.mark.parametrize("number", ["5", "0", "many"])
def test_processes_that_cannot_share_the_devices_are_refused(monkeypatch, number):
    monkeypatch.setenv(meeting.NUM_PROCESSES, number)
    with pytest.raises(WrongInput, match=f"{meeting.NUM_PROCESSES}={number}.* = 6144 devices"):
        said("palm_540b")


@pytest.mark.parametrize(
    ("overrides", "numbers"),
    [
        (["mesh.fsdp=100"], ["2 x 100 = 200", "numerics.lanes=512"]),
        (["model.width=18440"], ["model.width=18440", "numerics.lanes=512"]),
        (["mesh.tensor=10"], ["model.num_heads = 48", "mesh.tensor=10"]),
        (["model.vocabulary_multiple=128"], ["vocabulary_size = 256000", "mesh.tensor=12"]),
        (["model.feed_forward=70000"], ["model.feed_forward = 70000", "mesh.tensor=12"]),
        (
            ["model.width=18944", "model.feed_forward=73728"],
            ["model.width = 18944", "mesh.tensor=12"],
        ),
        (["mesh.emulated_devices=8"], ["mesh.emulated_devices=8", "2 x 256 x 12 = 6144"]),
        (["data.ramp.sizes=[512, 1024, 2000]"], ["holds 2000", "512 x 1 = 512"]),
    ],
)
def test_mesh_that_does_not_fit_is_refused_with_both_numbers(overrides, numbers):
    with pytest.raises(WrongInput) as caught:
        said("palm_540b", *overrides)
    assert [number for number in numbers if number not in str(caught.value)] == []
