"""A run with a bit of everything that is read without JAX: segments, a branch, a diagnosis."""

from __future__ import annotations

import json
import pathlib
from typing import Any

from report import books

from palm_jax.diagnosis import arms
from palm_jax.diagnosis.arms import Treatment
from palm_jax.record.segments import Departure, Intervention, Segment

ONSET, FORK, STOP, EARLIER = 30, 26, 36, 10
CASE = pathlib.Path("diagnoses", f"000-{ONSET:06d}")


def made(run: pathlib.Path) -> pathlib.Path:
    """The smallest such run in the folder `run`."""
    change = Intervention(at=20, changes={"schedule.peak": 0.005}, reason="x")
    later = Segment(
        segment=1,
        parent=Departure(segment=0, step=20),
        start_step=20,
        reason="why",
        exclusions=((160, 320),),
        interventions=(change,),
    )
    spike = {"segment": 0, "kind": "jump", "onset": ONSET, "detected": ONSET, "vital": "loss"}
    programs = {"lowered_digest": "aa", "fingerprint": "ff", "optimized_digest": "bb"}
    layers = {"layers/max_attention_logit": [1.0, 2.0, "nan"], "layers/residual_rms": [1.0] * 3}
    first = [
        books.start(0, 0),
        books.event("program", segment=0, step=0, compile_seconds=1.0, **programs),
        *books.steps(0, ONSET, clip_factor=0.5, **layers),
        books.step(ONSET, loss=9.0, gradient_norm="inf", applied=False),
        books.event("incident", **spike, value=9.0, limit=2.5),
        *books.steps(ONSET + 1, 40),
        books.event(
            "evaluation", segment=0, step=40, split="held_out", loss=2.0, bits_per_byte=1.0
        ),
        books.event("checkpoint", segment=0, step=40, state_digest="ab"),
        books.event("stop", segment=0, step=40, signal="SIGTERM", state_digest="ab"),
    ]
    rolled = {"action": "rollback", "incident": ["jump", ONSET, ONSET], "opens_segment": 1}
    second = [
        books.event("incident_closed", **spike, outcome="diverged", closed=39),
        books.event("decision", segment=0, step=39, **rolled),
        books.event("intervention", segment=1, from_step=20, at=20, reason="why",
                    changes={"schedule.peak": [0.01, 0.005]}, exclusions=[[160, 320]]),
        books.start(1, 20),
        *books.steps(20, 40, segment=1),
        books.event("alarm", segment=1, step=25, vital="gradient_norm", value=9.0, why="high"),
        books.event("note", text="calm"),
        books.event("stop", segment=1, step=40, signal=None, state_digest="cd"),
    ]  # fmt: skip
    books.write(run, first, second, segments=(Segment(), later))
    departure = Departure(run="../..", segment=0, step=8)
    branch = Segment(parent=departure, start_step=8, interventions=(change,))
    books.write(run / "branches" / "cure", books.steps(8, 12), segments=(branch,))
    _diagnosed(run / CASE)
    return run


def plan() -> arms.Plan:
    return arms.planned(
        asked=(4, 6, True),
        segment=0,
        onset=ONSET,
        fork=FORK,
        window_stop=32,
        stop=STOP,
        start=0,
        earlier=[20, EARLIER, 0],
        healthy=EARLIER,
        budget=100,
        seconds_per_step=0.5,
        treatments=[Treatment("half the rate", rate_scale=0.5)],
    )


def result(arm: arms.Arm) -> dict[str, Any]:
    return {
        "arm": arm.model_dump(mode="json"),
        "begin": 2.0,
        "probe": [2.0, "inf"] * ((arm.stop - arm.scored_from) // 2)
        + [2.0] * ((arm.stop - arm.scored_from) % 2),
        "loss": [2.0],
        "gradient_norm": [1.0],
        "rate": [0.01],
        "applied": 1,
        "bits": {str(FORK): {"loss": "aa"}},
        "state_digests": {"40": "ab"},
        "state_digest": "ab",
        "damaged": [],
        "seconds": 0.5,
    }


def _diagnosed(case: pathlib.Path) -> None:
    planned = plan()
    (case / "arms").mkdir(parents=True)
    (case / "plan.json").write_text(planned.model_dump_json())
    for name in ("A1", "N0", "B0"):
        arm = planned.arm(name)
        assert arm is not None
        (case / "arms" / f"{name}.json").write_text(json.dumps(result(arm)))
    suspect = {
        **{"step": ONSET, "row": 1, "sequence": 5, "loss": "inf", "gradient_norm": None},
        **{"text": [1.0], "unusual": {"loss": 9.0}, "sources": ["a [0:9]"], "excerpt": "text"},
    }
    forensics = {
        **{"window_loss": 3.0, "reference_loss": 2.0, "window_gradient_norm": 1.0},
        **{"reference_gradient_norm": None, "suspects": [suspect], "num_unusual": 1},
        "gradients": [{"step": ONSET, "norm": 1.0, "cosine": None, "kurtosis": 3.0}],
    }
    verdict = {
        **{"verdict": "data", "because": "so", "onset": ONSET, "fork": FORK, "stop": STOP},
        "votes": {"N": {"spiked": 1, "of": 2, "interval": [0.1, 0.9]}},
        "first_vitals": [{"vital": "gradient_norm", "step": 28, "before_loss": 2}],
        "forensics": forensics,
        "recommendation": {"treatment": "exclude", "why": "it cures", "commands": ["palm-jax"]},
    }
    (case / "forensics.json").write_text(json.dumps(forensics))
    (case / "verdict.json").write_text(json.dumps(verdict))


FILES = (
    "logbook/0000.jsonl",
    "logbook/0001.jsonl",
    "segments/000/segment.json",
    "segments/001/segment.json",
    "config.yaml",
    "branches/cure/config.yaml",
    "branches/cure/segments/000/segment.json",
    "branches/cure/logbook/0000.jsonl",
    f"{CASE}/plan.json",
    f"{CASE}/verdict.json",
    f"{CASE}/forensics.json",
    f"{CASE}/arms/A1.json",
    f"{CASE}/arms/B0.json",
)
