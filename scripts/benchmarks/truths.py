"""Whether diagnoses find the causes of spikes whose causes are known, and what they cost.

Makes small runs that spike for a known reason, three seeds of each, and has
`palm-jax spikes diagnose` name it. Reads the corpus that scripts/quickstart prepares from, cut
into sequences of 64; prepares it itself if need be. What is done is not done again.
"""

from __future__ import annotations

import argparse
import collections.abc
import contextlib
import itertools
import json
import logging
import pathlib
import sys
import time
import unittest.mock
from typing import Any

import _command

from palm_jax import config, start, stream
from palm_jax.errors import CannotDo

CORPUS = pathlib.Path("runs/corpus64")
BASE = (
    *(f"data.corpus={CORPUS}", "model.sequence_length=64", "data.ramp.sizes=[32]"),
    *("checkpoint.every=20", "checkpoint.keep_last=99", "log.every=5", "log.tensorboard=false"),
    "spikes.patience_steps=20",
)


def settings_of(seed: int, *overrides: str) -> config.Config:
    return config.load("configs/tiny.yaml", [*BASE, f"seed={seed}", *overrides])


# --- worlds ---


def garbage(folder: pathlib.Path, seed: int) -> None:
    """A cipher in place of the text of steps 150 to 179."""
    _planted(folder, settings_of(seed, "steps=240"), range(150, 180), "cipher")


def rare_text(folder: pathlib.Path, seed: int) -> None:
    """One batch of random bytes at a low rate."""
    settings = settings_of(seed, "steps=220", "schedule.peak=0.003")
    _planted(folder, settings, range(150, 151), "random")


def hot_rate(folder: pathlib.Path, seed: int) -> None:
    """AdamW without QK norm, ten times the rate from step 150 on, at which every seed spikes."""
    from palm_jax.record.folder import RunFolder
    from palm_jax.replay import branches

    settings = settings_of(seed, "steps=220", *ADAMW)
    _train(folder, settings.model_copy(update={"steps": 150}))
    run = RunFolder((folder / "run").absolute())
    if run.last_segment() == 0:
        changes = branches.Changes(overrides=("schedule.peak=0.1",))
        branches.intervene(run, 150, changes, "to be faster")
    _train(folder, settings)


def stale_moments(folder: pathlib.Path, seed: int) -> None:
    """From step 140 on, second moments of AdamW that are far too small, and long remembered."""
    settings = settings_of(seed, "steps=220", *ADAMW, "optimizer.beta2=0.999")

    _doctored(folder, settings, 140, _smaller_moments(1e-4))


def flipped_bit(folder: pathlib.Path, seed: int) -> None:
    """As garbage; but the lowest bit of one parameter flips in memory before step 115."""
    with _flipping(lambda state: int(state.step) == 115):
        garbage(folder, seed)


def flipping_bits(folder: pathlib.Path, seed: int) -> None:
    """As garbage; but the machine that diagnoses flips a bit now and then."""
    garbage(folder, seed)


def clean(folder: pathlib.Path, seed: int) -> None:
    """Nothing is wrong."""
    _train(folder, settings_of(seed, "steps=220", "schedule.peak=0.003"))


ADAMW = (
    "optimizer={name: adamw}",
    "schedule={kind: cosine, peak: 0.01, warmup_steps: 20, decay_steps: 2000}",
)
WORLDS: dict[str, tuple[str, collections.abc.Callable[[pathlib.Path, int], None]]] = {
    "garbage": ("data", garbage),
    "hot rate": ("recipe", hot_rate),
    "stale moments": ("state", stale_moments),
    "flipped bit": ("corrupted", flipped_bit),
    "flipping bits": ("nondeterministic", flipping_bits),
    "rare text": ("hard batch", rare_text),
    "clean": ("no incident", clean),
}


def _smaller_moments(factor: float) -> collections.abc.Callable[[Any], Any]:
    """Of AdamW's second moments."""
    import jax

    def smaller(path: tuple[Any, ...], leaf: Any) -> Any:
        return leaf * factor if any(getattr(p, "name", None) == "nu" for p in path) else leaf

    return lambda state: state.replace(
        optimizer=jax.tree_util.tree_map_with_path(smaller, state.optimizer)
    )


def _train(folder: pathlib.Path, settings: config.Config) -> None:
    from palm_jax import train

    outcome = train.train(settings, folder / "run")
    if outcome.step < settings.steps and outcome.gave_up is None:
        raise CannotDo(f"{folder}/run stopped at step {outcome.step}; call this again")


def _ids(settings: config.Config, steps: range) -> list[int]:
    from palm_jax import data
    from palm_jax.corpus.reader import Corpus

    ramp = settings.data.ramp
    positions = [p for step in steps for _, p in stream.Stream(ramp).places(step)]
    with Corpus.open(settings.data.corpus) as corpus:
        num_sequences = corpus.num_sequences("train")
    return data.sequence_ids(settings.seed, positions, num_sequences).tolist()


def _planted(folder: pathlib.Path, settings: config.Config, steps: range, kind: Any) -> None:
    from palm_jax.corpus import planted

    corpus = folder / "corpus"
    if not corpus.exists():
        planted.plant(CORPUS, corpus, _ids(settings, steps), settings.seed, kind)
    _train(folder, config.override(settings, [f"data.corpus={corpus}"]))


def _doctored(
    folder: pathlib.Path,
    settings: config.Config,
    step: int,
    change: collections.abc.Callable[[Any], Any],
) -> None:
    """Train to `step`, then go on in a segment whose first state was changed."""
    from palm_jax import sharding
    from palm_jax.corpus.reader import Corpus
    from palm_jax.course import Course
    from palm_jax.record import folder as folders
    from palm_jax.record import segments
    from palm_jax.record.checkpoints import Checkpoints
    from palm_jax.replay import states

    _train(folder, settings.model_copy(update={"steps": step}))
    run = folders.RunFolder((folder / "run").absolute())
    if run.last_segment() == 0:
        first = segments.read(run.segment(0))
        second = first.model_copy(
            update={
                "segment": 1,
                "start_step": step,
                "parent": segments.Departure(segment=0, step=step),
                "reason": "the state was changed by hand",
            }
        )
        with Corpus.open(settings.data.corpus) as corpus:
            course = Course(settings, first, corpus, sharding.make_mesh(settings.mesh))
            state = states.state_before(run, course, step).state
        folders.open_segment(run, second)
        with Checkpoints(run.checkpoints(1), settings.checkpoint) as saved:
            saved.save(step, change(state), {"segment": 1}, None)
            saved.wait()
    _train(folder, settings)


@contextlib.contextmanager
def _flipping(when: collections.abc.Callable[[Any], bool]) -> collections.abc.Iterator[None]:
    """Steps that flip the lowest bit of one parameter first, `when` a state is due."""
    import jax
    import jax.numpy as jnp

    from palm_jax import step as stepping

    ordinary = stepping.Program.step

    def step(self: Any, state: Any, batch: Any, controls: Any) -> Any:
        if when(state):
            table = state.params["embedding_VD"]
            bits = jax.lax.bitcast_convert_type(table, jnp.uint32)
            bits = bits.at[101, 0].set(bits[101, 0] ^ 1)
            table = jax.lax.bitcast_convert_type(bits, jnp.float32)
            state = state.replace(params={**state.params, "embedding_VD": table})
        return ordinary(self, state, batch, controls)

    with unittest.mock.patch.object(stepping.Program, "step", step):
        yield


def _never(state: Any) -> bool:
    return False


def _now_and_then(seed: int) -> collections.abc.Callable[[Any], bool]:
    calls = itertools.count(seed)
    return lambda state: next(calls) % 97 == 96


# --- the table ---


def diagnose(run: pathlib.Path) -> dict[str, Any]:
    from palm_jax.diagnosis import diagnose as diagnosing
    from palm_jax.record import folder
    from palm_jax.replay import bundles

    there = folder.RunFolder(run.absolute())
    settings = there.config()
    located = diagnosing.locate(there, settings.spikes, None, None)
    if located is None:
        return {"verdict": "no incident", "votes": {}, "steps_executed": 0, "seconds": 0.0}
    began = time.perf_counter()
    with bundles.open_rows(there, settings) as corpus:
        plan = diagnosing.make_plan(there, settings, corpus, located)
        case = diagnosing.Diagnosis(there, settings, corpus, located, plan)
        case.conduct(decided=lambda arm, found: print(f"  {arm.name}", end="", file=sys.stderr))
        report = case.report(str(run))
    print(file=sys.stderr)
    return {**report, "seconds": time.perf_counter() - began}


def row(world: str, wanted: str, results: list[dict[str, Any]]) -> str:
    told = ", ".join(r["verdict"] for r in results)
    right = sum(r["verdict"] == wanted for r in results)
    votes = "; ".join(
        " ".join(f"{kind} {v['spiked']}/{v['of']}" for kind, v in r["votes"].items())
        for r in results
    )
    steps = ", ".join(str(r["steps_executed"]) for r in results)
    return f"| {world} | {wanted} | {right} of {len(results)} | {told} | {votes} | {steps} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--worlds", default=",".join(WORLDS), help="separated by commas")
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("runs/truths"))
    given = parser.parse_args()
    worlds = given.worlds.split(",")
    if unknown := [world for world in worlds if world not in WORLDS]:
        parser.error(f"no world {unknown[0]}; there are: {', '.join(WORLDS)}")
    start.start(settings_of(0))
    logging.getLogger("absl").setLevel(logging.CRITICAL)

    from palm_jax.corpus import prepare

    if not CORPUS.exists():
        prepare.prepare(source="stdlib", out=CORPUS, sequence_length=64, held_out=0.05)
    print("| world | truth | named | verdicts | votes | steps |")
    print("|" + "--|" * 6)
    for world in worlds:
        wanted, make = WORLDS[world]
        results = []
        for seed in range(given.seeds):
            folder = given.folder / f"{world.replace(' ', '-')}-{seed}"
            kept = folder / "verdict.json"
            if not kept.exists():
                folder.mkdir(parents=True, exist_ok=True)
                print(f"{world}, seed {seed}", file=sys.stderr, flush=True)
                made = folder / "made"
                if not made.exists():
                    make(folder, seed)
                    made.touch()
                with _flipping(_now_and_then(seed) if world == "flipping bits" else _never):
                    kept.write_text(json.dumps(diagnose(folder / "run")))
            results.append(json.loads(kept.read_text()))
        print(row(world, wanted, results), flush=True)


if __name__ == "__main__":
    _command.run(main)
