"""`palm-jax plan`: what it prints, in figures whose units are in their names."""

from __future__ import annotations

import json
import pathlib

import pytest
from typer.testing import CliRunner

from palm_jax import cli
from palm_jax.errors import WrongInput

CONFIGS = pathlib.Path(__file__).parents[2] / "configs"
P540, P8 = CONFIGS / "palm_540b.yaml", CONFIGS / "palm_8b.yaml"
TWO_PODS = ("--topology", "v4:12x16x16", "--slices", 2)


def said(*words) -> str:
    done = CliRunner().invoke(cli.app, ["plan", *map(str, words)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def figures(*words):
    (line,) = said(*words, "--json").splitlines()
    return json.loads(line)


def refused(*words) -> str:
    done = CliRunner().invoke(cli.app, ["plan", *map(str, words)])
    assert isinstance(done.exception, WrongInput), done.output
    return str(done.exception)


# --- flops ---


def test_palms_own_rate_gives_the_published_utilisation():
    found = figures(
        "flops", P540, "--tokens-per-second", 238300, "--chips", 6144, "--peak-tflops", 275
    )
    # The paper counts 540.35 billion parameters, the config six million more.
    assert found["mfu"] == pytest.approx(0.462289, abs=1e-5)
    assert found["hfu"] == pytest.approx(0.578281, abs=1e-5)
    assert found["flops_per_token"] == pytest.approx(3.277735e12, rel=2e-5)
    assert found["hardware_flops_per_token"] == pytest.approx(4.100138e12, rel=2e-5)
    assert found["step_seconds"] == pytest.approx(17.601, abs=5e-4)
    assert found["tokens"] == 775_946_240_000


def test_plain_numbers_do_where_there_is_no_config():
    shape = ("--layers", 105, "--heads", 128, "--head-size", 160, "--sequence", 2048)
    rate = ("--tokens-per-second", 65.43e3, "--chips", 2240, "--peak-tflops", 312)
    assert figures("flops", "--parameters", 530e9, *rate)["mfu"] == pytest.approx(0.2977, abs=5e-5)
    found = figures("flops", "--parameters", 530e9, *shape, *rate)
    assert found["mfu"] == pytest.approx(0.3027, abs=5e-5)
    exact = figures(
        "flops",
        "--parameters",
        540.35e9,
        "--layers",
        118,
        "--heads",
        48,
        "--head-size",
        256,
        "--sequence",
        2048,
        "--remat",
        "full",
        "--tokens-per-second",
        238300,
        "--chips",
        6144,
        "--peak-tflops",
        275,
    )
    assert exact["mfu"] == pytest.approx(0.462289, abs=5e-7)
    assert exact["hfu"] == pytest.approx(0.578281, abs=5e-7)


def test_remat_of_attention_alone_repeats_little():
    found = figures("flops", P8)
    # PaLM, appendix B: 0.0550 and 0.0561 TFLOP a token.
    assert found["flops_per_token"] == pytest.approx(0.0550e12, abs=5e7)
    assert found["hardware_flops_per_token"] == pytest.approx(0.0561e12, abs=5e7)


def test_a_utilisation_gives_the_rate_that_gives_it_back():
    where = ("--chips", 6144, "--peak-tflops", 275)
    rate = figures("flops", P540, "--utilisation", 0.462289, *where)["tokens_per_second"]
    assert rate == pytest.approx(238300, rel=1e-4)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "give a CONFIG, or --parameters"),
        ((P540, "--tokens-per-second", 5e5, "--chips", 6144, "--peak-tflops", 275), "of the peak"),
        ((P8, "--tokens-per-second", 5e5), "needs --chips and --peak-tflops"),
        ((P540, "--utilisation", 1.2, "--chips", 1, "--peak-tflops", 1), "at most 1"),
        ((P540, "--tokens-per-second", "nan"), "--tokens-per-second nan"),
        ((P540, "--tokens", -1), "--tokens -1"),
        (("--parameters", 1e9, "--layers", 3), "go together"),
        (("--parameters", 1e9, "--remat", "some"), "--remat some: one of none"),
    ],
)
def test_flops_that_cannot_be_are_refused(words, message):
    assert message in refused("flops", *words)


# --- kv ---


def test_cache_of_each_kind_of_attention():
    found = figures("kv", P540, "--tokens", 131072)
    kinds = found["kinds"]
    assert found["bytes_per_token"] == 120_832
    assert [k["bytes_per_token"] for k in kinds.values()] == [5_799_936, 966_656, 120_832]
    gigabytes = [k["cache_bytes"] / 1e9 for k in kinds.values()]
    assert gigabytes == pytest.approx([760.209, 126.702, 15.838], abs=5e-4)
    assert kinds["multi-query"]["tokens_like_weights"] == pytest.approx(
        2 * 540_356_456_448 / 120_832
    )


def test_cache_of_plain_numbers():
    found = figures("kv", "--layers", 118, "--heads", 8, "--head-size", 256, "--tokens", 10)
    assert found == {
        "bytes_per_token": 966_656,
        "cache_bytes": 9_666_560,
        "tokens": 10,
        "assumptions": [],
    }
    assert "--layers, --heads and --head-size" in refused("kv", "--layers", 3)


# --- laws ---


def test_chinchilla_under_three_sets_of_constants():
    laws = figures("chinchilla", "--flops", 5.76e23)["laws"]
    assert [laws[n]["parameters"] for n in ("printed", "unrounded", "refitted")] == pytest.approx(
        [3.219e10, 4.036e10, 7.225e10], rel=5e-4
    )
    given = figures("chinchilla", "--parameters", 70e9, "--tokens", 1.4e12)["given"]
    assert given["loss_nats_per_token"]["printed"] == pytest.approx(1.93665, abs=5e-6)
    assert "go together" in refused("chinchilla", "--parameters", 1e9)
    assert "--flops 0" in refused("chinchilla", "--flops", 0)


def test_carbon_of_palm_is_the_published_figure():
    found = figures("carbon", "--chip-hours", 8404992)
    assert found["machine_mwh"] == pytest.approx(3181.289, abs=5e-4)
    assert found["tonnes_co2e"] == pytest.approx(271.4276, abs=5e-5)
    assert {p["run"]: p["tonnes_co2e"] for p in found["published"]}["PaLM 540B"] == 271.43
    assert "no two count the same" in said("carbon")
    assert "--overhead 0.9" in refused("carbon", "--overhead", 0.9)


def test_batches():
    found = figures("batch", P540, "--loss", 3.0)
    assert found["tokens"] == 775_946_240_000
    assert found["critical_batch_tokens"] == pytest.approx(1.069e6, rel=5e-4)
    assert [s["batch_sequences"] for s in found["stages"]] == [512, 1024, 2048]
    rate = figures("batch", "--rate", 0.01, "--reference-batch", 512, "--batch", 2048)["rate"]
    assert rate == pytest.approx(0.02)
    noise = figures("batch", "--norms", "8,64,16,5.5")
    assert (noise["squared_gradient"], noise["variance"], noise["noise_scale_batch"]) == (4, 96, 24)
    assert "four numbers" in refused("batch", "--norms", "8,64")
    assert "the first must be the smaller" in refused("batch", "--norms", "64,8,1,1")
    assert "no gradient is left" in refused("batch", "--norms", "8,64,16,2")
    assert "go together" in refused("batch", "--rate", 0.1)


# --- goodput and spikes ---


def test_goodput_of_a_preset_and_of_numbers():
    found = figures("goodput", "--preset", "llama3")
    assert found["interval_hours"] == pytest.approx(0.5562, abs=5e-5)
    assert found["goodput"] == pytest.approx(0.7468, abs=5e-5)
    assert found["goodput_renewal"] == pytest.approx(0.7684, abs=5e-5)
    assert found["goodput_simulated"] == pytest.approx(0.768, abs=0.004)
    numbers = ("--mtbf-hours", 112, "--save-hours", 10 / 60, "--recovery-hours", 1)
    assert figures("goodput", *numbers, "--days", 20)["interval_hours"] == pytest.approx(
        6.11, abs=5e-4
    )
    chips = figures(
        "goodput",
        "--chip-mtbf-years",
        5,
        "--chips",
        100_000,
        "--save-hours",
        1 / 60,
        "--recovery-hours",
        5 / 60,
        "--days",
        2,
    )
    assert chips["mtbf_hours"] == pytest.approx(0.438)
    assert chips["goodput"] == pytest.approx(0.5506, abs=5e-5)


def test_goodput_of_a_log_of_interruptions(tmp_path):
    log = tmp_path / "interruptions.csv"
    log.write_text("hours,cause\n3,disk\n10,network\n12,GPU\n")
    rest = ("--save-hours", 0.01, "--recovery-hours", 0.1, "--days", 2)
    found = figures("goodput", "--log", log, "--log-hours", 30, *rest)
    assert found["mtbf_hours"] == 10
    assert any("3 interruptions in 30 h" in line for line in found["assumptions"])
    log.write_text("when\n3\n")
    assert "column `hours`" in refused("goodput", "--log", log, *rest)
    assert "No such file" in refused("goodput", "--log", tmp_path / "none.csv", *rest)


def test_asynchronous_and_second_place(tmp_path):
    fast = ("--mtbf-hours", 3, "--save-hours", 0.005, "--recovery-hours", 0.05, "--days", 5)
    plain = figures("goodput", *fast)
    behind = figures("goodput", *fast, "--write-hours", 0.2)
    assert behind["goodput_simulated"] < plain["goodput_simulated"]
    assert behind["interval_hours"] >= 0.2
    picture = tmp_path / "goodput.svg"
    durable = ("--durable-save-hours", 0.05, "--durable-recovery-hours", 0.3)
    both = figures("goodput", *fast, *durable, "--picture", picture)
    assert both["durable_interval_hours"] > both["interval_hours"]
    assert both["goodput_simulated"] < plain["goodput_simulated"]
    assert picture.read_text().startswith("<svg")


def test_goodput_says_what_is_missing_or_cannot_be():
    assert "--mtbf-hours is missing" in refused("goodput")
    assert "one of llama3" in refused("goodput", "--preset", "gpt5")
    both = ("--mtbf-hours", 3, "--chip-mtbf-years", 5, "--chips", 8)
    assert "give one of them" in refused("goodput", *both)
    impossible = ("--mtbf-hours", -3, "--save-hours", 0.1, "--recovery-hours", 1)
    assert "--mtbf-hours -3" in refused("goodput", *impossible)


def test_first_order_form_is_left_out_where_it_fails():
    hopeless = ("--mtbf-hours", 0.1, "--save-hours", 0.1, "--recovery-hours", 0.1, "--days", 1)
    found = figures("goodput", *hopeless)
    assert found["goodput"] is None
    assert 0 < found["goodput_simulated"] < 0.3
    assert any("left out" in line for line in found["assumptions"])


def test_spikes_cost_what_a_hand_calculation_says():
    found = figures("spikes", P540, "--spikes", 20, "--step-seconds", 17.6)
    # 100 steps back, on average 249.5 more to the next checkpoint, and 20 until it is noticed.
    assert found["steps_redone"] == 20 * (100 + 249.5 + 20)
    assert found["hours"] == pytest.approx(20 * 369.5 * 17.6 / 3600)
    assert found["share_of_run"] == pytest.approx(20 * 369.5 / 255000)
    assert found["batches_left_out"] == 20 * 300
    assert "does not reach it" in refused("spikes", P540, "--excluded-batches", 50)


# --- the whole run ---


def test_run_of_the_540b_stands_beside_the_published_hours(tmp_path):
    page = tmp_path / "plan.html"
    found = figures("run", P540, *TWO_PODS, "--tokens-per-second", 238300, "--html", page)
    beside = found["published"]
    assert beside["chip_hours"] == 8_404_992
    assert beside["chip_hours_at_measured_rate"] == pytest.approx(5_586_236, abs=1)
    assert beside["ratio"] == pytest.approx(1.5046, abs=5e-5)
    assert found["mfu"] == pytest.approx(0.462289, abs=1e-5)
    # 12 bytes a parameter of the padded vocabulary, over all chips.
    assert found["checkpoint_bytes"] == pytest.approx(12 * 540.366e9, rel=1e-5)
    assert found["chip_hours"] == pytest.approx(775_946_240_000 / 238300 * 6144 / 3600)
    assert found["chip_hours_to_book"] > found["chip_hours_with_failures"] > found["chip_hours"]
    assert found["fits"] is True
    text = page.read_text()
    assert text.count("<svg") == 2
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
    told = said("run", P540, *TWO_PODS)
    assert "8,404,992" in told
    assert "5,586,236" in told
    assert "1.50" in told
    assert "Hypotheses, of what may explain the ratio:" in told


def test_run_of_other_models_has_nothing_published_beside_it():
    found = figures("run", P8, "--topology", "v4:4x8x8", "--utilisation", 0.5)
    assert "published" not in found
    # 4.3e22 FLOPs at half of 256 chips' peak.
    seconds = found["train_flops"] / (0.5 * 256 * 275e12)
    assert found["days"] == pytest.approx(seconds / 86400)
    assert sum(s["days"] for s in found["stages"]) == pytest.approx(found["days"])


def test_run_wants_the_chips_of_its_mesh():
    message = refused("run", P540, "--topology", "v4:4x8x8")
    assert "= 6144, but --topology and --slices have 256 chips" in message


DOCUMENTED = [
    line.split()[2:]
    for line in (CONFIGS.parent / "docs/plan.md").read_text().splitlines()
    if line.startswith("palm-jax plan") and "--run" not in line
]


@pytest.mark.parametrize("words", DOCUMENTED, ids=" ".join)
def test_commands_of_the_page_answer_and_say_what_they_assume(words, tmp_path, monkeypatch):
    (tmp_path / "configs").symlink_to(CONFIGS)
    monkeypatch.chdir(tmp_path)
    told = said(*words)
    assert "Assumed:" in told
