"""A whole run on so many chips: memory, time, failures, energy, and what to put by."""

from __future__ import annotations

import dataclasses

from palm_jax import config
from palm_jax.errors import WrongInput
from palm_jax.plan import carbon, flops, memory, parameters, reliability


@dataclasses.dataclass(frozen=True)
class Machines:
    """The chips, and what is assumed of them."""

    chips: int
    peak_flops: float  # of one, bfloat16
    hbm_bytes: int  # of one, that a program may take
    chips_per_host: int = 4
    to_host_bytes_s: float = 5e9  # a host's chips together; the loop waits for that
    write_bytes_s: float = 0.5e9  # a host, to where checkpoints stay
    chip_mtbf_years: float = 5.0  # Llama 3's GPUs: 5.8; BLOOM's: 4.9
    recovery_hours: float = 0.25


@dataclasses.dataclass(frozen=True)
class Stage:
    """Of the batch ramp."""

    start_step: int
    batch_sequences: int
    tokens: int
    step_seconds: float
    days: float


@dataclasses.dataclass(frozen=True)
class Whole:
    parameters: int
    chips: int
    tokens: int
    train_flops: float
    mfu: float
    hfu: float
    tokens_per_second: float
    stages: tuple[Stage, ...]
    days: float  # of training steps alone
    chip_hours: float
    checkpoint_bytes: int
    saving: reliability.Saving
    interval_hours: float
    interval_steps: int  # of the largest batch
    configured_steps: int
    goodput: float  # at the best interval
    goodput_as_configured: float
    interruptions: float  # in all the time that it takes
    days_with_failures: float
    chip_hours_with_failures: float
    contingency: float
    chip_hours_to_book: float
    energy: carbon.Carbon  # of the hours with failures


def plan(
    settings: config.Config,
    machines: Machines,
    *,
    mfu: float | None = None,
    tokens_per_second: float | None = None,
    contingency: float = 0.1,
    watts: float = carbon.PALM_WATTS,
    overhead: float = carbon.PALM_OVERHEAD,
    tonnes_per_mwh: float = carbon.PALM_TONNES_PER_MWH,
) -> Whole:
    """Put it together for a config, at a utilisation or a rate of tokens.

    Raises:
      WrongInput: neither or both are given, or they are beyond the peak.
    """
    if (mfu is None) == (tokens_per_second is None):
        raise WrongInput("give one of --utilisation and --tokens-per-second")
    if contingency < 0:
        raise WrongInput(f"--contingency {contingency:g}: it must be at least 0")
    needed = flops.train_flops_per_token(settings.model)
    done = flops.hardware_flops_per_token(settings.model)
    if tokens_per_second is None:
        assert mfu is not None
        tokens_per_second = flops.rate_at(mfu, needed, machines.chips, machines.peak_flops)
    tokens_by_stage = flops.tokens_by_stage(settings)
    tokens = sum(tokens_by_stage)
    rate = flops.Throughput(
        needed, done, tokens_per_second, machines.chips, machines.peak_flops, tokens
    )
    if rate.hfu > 1:
        raise WrongInput(
            f"{tokens_per_second:,.0f} tokens a second would be {rate.hfu:.1%} of the peak of "
            f"{machines.chips:,} chips"
        )
    ramp, length = settings.data.ramp, settings.model.sequence_length
    stages = tuple(
        Stage(
            start,
            size,
            of_stage,
            size * length / tokens_per_second,
            of_stage / tokens_per_second / 86400,
        )
        for start, size, of_stage in zip(ramp.starts, ramp.sizes, tokens_by_stage, strict=True)
    )
    assert rate.seconds is not None
    assert rate.chip_hours is not None
    saved = memory.state_bytes(settings)
    saving = _saving(saved, machines)
    best = reliability.best_interval(saving)
    step_hours = max(stage.step_seconds for stage in stages) / 3600
    goodput = reliability.renewal_failing(saving, best)
    configured = max(settings.checkpoint.every * step_hours, saving.write_hours)
    with_failures = rate.chip_hours / goodput
    return Whole(
        parameters=parameters.number(settings.model),
        chips=machines.chips,
        tokens=tokens,
        train_flops=needed * tokens,
        mfu=rate.mfu,
        hfu=rate.hfu,
        tokens_per_second=tokens_per_second,
        stages=stages,
        days=rate.seconds / 86400,
        chip_hours=rate.chip_hours,
        checkpoint_bytes=saved,
        saving=saving,
        interval_hours=best,
        interval_steps=max(1, round(best / step_hours)),
        configured_steps=settings.checkpoint.every,
        goodput=goodput,
        goodput_as_configured=reliability.renewal_failing(saving, configured),
        interruptions=with_failures / machines.chips / saving.mtbf_hours,
        days_with_failures=rate.seconds / 86400 / goodput,
        chip_hours_with_failures=with_failures,
        contingency=contingency,
        chip_hours_to_book=with_failures * (1 + contingency),
        energy=carbon.carbon(with_failures, watts, overhead, tonnes_per_mwh),
    )


def _saving(saved_bytes: int, machines: Machines) -> reliability.Saving:
    """Each host writes its share; the loop waits until its chips have handed theirs over."""
    hosts = max(1, machines.chips // machines.chips_per_host)
    share = saved_bytes / hosts
    return reliability.Saving(
        mtbf_hours=reliability.cluster_mtbf(machines.chip_mtbf_years, machines.chips),
        save_hours=share / machines.to_host_bytes_s / 3600,
        recovery_hours=machines.recovery_hours,
        write_hours=share / machines.write_bytes_s / 3600,
    )
