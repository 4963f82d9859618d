"""What going back behind spikes costs: steps computed again, and data never seen."""

from __future__ import annotations

import dataclasses

from palm_jax.errors import WrongInput


@dataclasses.dataclass(frozen=True)
class Mitigation:
    spikes: int
    steps_redone: float
    share_of_run: float  # of all steps
    batches_left_out: int
    hours: float | None  # of computing again; None without a step's time


def mitigation(
    spikes: int,
    steps: int,
    *,
    rewind_steps: int = 100,
    checkpoint_every: int = 1,
    noticed_after_steps: int = 20,
    excluded_batches: int = 300,
    step_seconds: float | None = None,
) -> Mitigation:
    """The cost of so many spikes in a run, on average.

    A spike is noticed some steps after its onset. The run goes back to the newest checkpoint at
    least `rewind_steps` before the onset; with one every c steps that is (c - 1) / 2 steps further
    back, on average. All of it is computed again, on other data.

    Args:
      excluded_batches: left out of the stream for each spike, before its onset and after.
    Source: PaLM, section 5.1: about 100 steps, and 200 to 500 batches.
    """
    if excluded_batches <= rewind_steps:
        raise WrongInput(
            f"--excluded-batches {excluded_batches} counts from --rewind-steps {rewind_steps} "
            "before the spike and does not reach it; make it larger"
        )
    back = rewind_steps + (checkpoint_every - 1) / 2
    redone = spikes * (back + noticed_after_steps)
    return Mitigation(
        spikes=spikes,
        steps_redone=redone,
        share_of_run=redone / steps,
        batches_left_out=spikes * excluded_batches,
        hours=None if step_seconds is None else redone * step_seconds / 3600,
    )
