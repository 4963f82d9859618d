"""What garbage in the data costs a run, and what it costs one that rolls back from it.

Plants random tokens in all sequences of some steps of the corpus that scripts/quickstart
prepares, and trains configs/tiny.yaml three times: over the clean corpus, over the planted one
with spikes.policy=observe, and with spikes.policy=rollback. Then the whole history of the last
run is replayed on other devices.
"""

from __future__ import annotations

import argparse
import pathlib
import sys

import _command

from palm_jax import config, start, stream

STEPS, GARBAGE = 260, (190, 230)
# PaLM's numbers, for a run of 260 steps instead of 255,000.
OVERRIDES = (
    *(f"steps={STEPS}", "checkpoint.every=20", "log.every=5", "log.tensorboard=false"),
    *("spikes.rewind_steps=20", "spikes.exclude_batches=80", "spikes.patience_steps=10"),
    *("spikes.same_place_steps=100", "mesh={emulated_devices: 8, fsdp: 8}"),
)
CORPUS = "runs/corpus"


def settings_of(corpus: pathlib.Path, policy: str) -> config.Config:
    overrides = [*OVERRIDES, f"data.corpus={corpus}", f"spikes.policy={policy}"]
    return config.load("configs/tiny.yaml", overrides)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("runs/garbage"))
    folder = parser.parse_args().folder
    settings = settings_of(pathlib.Path(CORPUS), "observe")
    start.start(settings)

    from palm_jax import data, train
    from palm_jax.corpus import planted
    from palm_jax.corpus.reader import Corpus
    from palm_jax.record import logbook
    from palm_jax.record.folder import RunFolder
    from palm_jax.replay.replay import replay

    if not (folder / "corpus").exists():
        ramp = settings.data.ramp
        positions = range(*(stream.sequences_before(ramp, step) for step in GARBAGE))
        with Corpus.open(CORPUS) as corpus:
            num_sequences = corpus.num_sequences("train")
        ids = data.sequence_ids(settings.seed, list(positions), num_sequences)
        folder.mkdir(parents=True, exist_ok=True)
        planted.plant(CORPUS, folder / "corpus", ids)

    losses: dict[str, float] = {}
    print("| corpus | spikes.policy | held-out loss | beside the clean corpus |")
    print("|" + "--|" * 4)
    for name, corpus, policy in (
        ("clean", pathlib.Path(CORPUS), "observe"),
        ("observe", folder / "corpus", "observe"),
        ("rollback", folder / "corpus", "rollback"),
    ):
        outcome = train.train(settings_of(corpus, policy), folder / name)
        if outcome.evaluation is None:
            print(f"error: {name} gave up: {outcome.gave_up}", file=sys.stderr)
            sys.exit(1)
        losses[name] = outcome.evaluation.loss
        beside = losses[name] / losses["clean"] - 1
        kind = "clean" if name == "clean" else "planted"
        print(f"| {kind} | {policy} | {losses[name]:.4f} | {beside:+.1%} |", flush=True)
    run = RunFolder(folder / "rollback")
    for record in logbook.read(run.path).records:
        if record["event"] == "decision" and record["action"] == "rollback":
            print(f"\n{record['reason']}")
    with Corpus.open(folder / "corpus") as corpus:
        for segment in range(run.last_segment() + 1):
            steps = [
                record["step"]
                for record in logbook.read(run.path).records
                if record["event"] == "step" and record["segment"] == segment
            ]
            found = replay(
                run,
                min(steps),
                max(steps) + 1,
                corpus=corpus,
                segment=segment,
                mesh=config.Mesh(data=2, fsdp=2),
                allow_environment=True,
            )
            print(
                f"segment {segment}, steps {min(steps)} to {max(steps)}, on 4 devices: "
                f"identical: {str(found.identical).lower()}"
            )


if __name__ == "__main__":
    _command.run(main)
