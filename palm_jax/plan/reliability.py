"""How often it breaks, how often to save, and how much of the time is training.

M hours between failures, delta hours that a save holds up training, R hours from a failure until
training goes on, tau hours of training between saves. Failures come at any moment with equal
chance, whatever happened before. Goodput is the share of all time spent on training that was kept.
"""

from __future__ import annotations

import dataclasses
import math

import scipy.optimize
import scipy.stats

from palm_jax.errors import WrongInput

HOURS_PER_YEAR = 365 * 24


@dataclasses.dataclass(frozen=True)
class Interruptions:
    """Observed on a cluster."""

    name: str
    chips: int
    hours: float
    count: float
    source: str

    @property
    def mtbf_hours(self) -> float:
        """M of the whole cluster."""
        return self.hours / self.count

    @property
    def chip_mtbf_years(self) -> float:
        return self.mtbf_hours * self.chips / HOURS_PER_YEAR


OBSERVED = {
    "llama3": Interruptions(
        "Llama 3 405B", 16_384, 54 * 24, 419, "Llama 3, table 5: 419 unexpected in 54 days"
    ),
    "bloom": Interruptions(
        "BLOOM 176B", 384, 168, 1.5, "BLOOM's chronicles: one or two GPUs a week of some 400"
    ),
    "opt": Interruptions(
        "OPT 175B", 992, 60 * 24, 105, "OPT, section 2.5: 35 restarts by hand, about 70 by itself"
    ),
}

# Llama 3, table 5. The paper prints 30.1% beside the first row; 148 of 419 are 35.3%. The share
# of the GPU, 58.7% in its text, repeats that: the rows of the GPU add up to 268, 64.0%.
LLAMA3_UNEXPECTED = {
    "faulty GPU": 148,
    "GPU HBM3 memory": 72,
    "software bug": 54,
    "network switch or cable": 35,
    "host maintenance, unplanned": 32,
    "GPU SRAM memory": 19,
    "GPU system processor": 17,
    "NIC": 7,
    "NCCL watchdog timeouts": 7,
    "silent data corruption": 6,
    "GPU thermal interface and sensor": 6,
    "SSD": 3,
    "power supply": 3,
    "server chassis": 2,
    "IO expansion board": 2,
    "dependency": 2,
    "CPU": 2,
    "system memory": 2,
}
LLAMA3_PLANNED = 47


def cluster_mtbf(chip_mtbf_years: float, chips: int) -> float:
    """M, in hours: any chip's failure is the run's."""
    return chip_mtbf_years * HOURS_PER_YEAR / chips


def mtbf_interval(count: int, hours: float, confidence: float = 0.9) -> tuple[float, float]:
    """Between which values M lies, in hours, where `count` failures were seen in `hours`.

    Source: the exact interval of a Poisson process, by the chi-squared distribution.
    """
    tail = (1 - confidence) / 2
    lowest = 2 * hours / float(scipy.stats.chi2.ppf(1 - tail, 2 * count + 2))
    return lowest, 2 * hours / float(scipy.stats.chi2.ppf(tail, 2 * count)) if count else math.inf


@dataclasses.dataclass(frozen=True)
class Saving:
    """What saving and failing cost.

    `write_hours`: how much longer than `save_hours`, which hold up the loop, a save needs until a
    failure can do it no harm. 0: the loop waits for all of it.
    """

    mtbf_hours: float
    save_hours: float
    recovery_hours: float
    write_hours: float = 0.0

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            option = "--" + name.replace("_", "-")
            least = "above" if name == "mtbf_hours" else "at least"
            if not math.isfinite(value) or value < 0 or (name == "mtbf_hours" and not value):
                raise WrongInput(f"{option} {value:g}: it must be finite and {least} 0")


def young(saving: Saving) -> float:
    """tau = sqrt(2 delta M), in hours (Young, 1974)."""
    return math.sqrt(2 * saving.save_hours * saving.mtbf_hours)


def daly(saving: Saving) -> float:
    """Daly's estimate of a higher order, in hours (Daly, 2006, equation 37)."""
    save, mtbf = saving.save_hours, saving.mtbf_hours
    if save >= 2 * mtbf:
        return mtbf
    x = save / (2 * mtbf)
    return math.sqrt(2 * save * mtbf) * (1 + math.sqrt(x) / 3 + x / 9) - save


def first_order(saving: Saving, interval_hours: float) -> float:
    """G = 1 - delta / (tau + delta) - tau / 2M - R / M.

    Good while a cycle is short against M; where it is not, this can fall below 0.
    """
    save, mtbf = saving.save_hours, saving.mtbf_hours
    waiting = save / (interval_hours + save)
    return 1 - waiting - interval_hours / (2 * mtbf) - saving.recovery_hours / mtbf


def renewal(saving: Saving, interval_hours: float) -> float:
    """Expected kept hours over expected hours, recovery taken to go undisturbed:

    G = tau / ((M + R) (e^((tau + delta) / M) - 1)) x e^(-w / M) for w hours of writing behind it.
    """
    return _kept(saving, interval_hours) / (saving.mtbf_hours + saving.recovery_hours)


def renewal_failing(saving: Saving, interval_hours: float) -> float:
    """`renewal` where recovery can fail as well, and is then begun again: M e^(R / M) for M + R."""
    mtbf = saving.mtbf_hours
    return _kept(saving, interval_hours) / (mtbf * math.exp(saving.recovery_hours / mtbf))


def _kept(saving: Saving, interval_hours: float) -> float:
    """Hours that one failure leaves, on average: tau x the sum of P(k saves were whole)."""
    mtbf = saving.mtbf_hours
    cycle = interval_hours + saving.save_hours
    if cycle / mtbf > 700:  # e to it is no float any more
        return 0.0
    return interval_hours * math.exp(-saving.write_hours / mtbf) / math.expm1(cycle / mtbf)


def best_interval(saving: Saving) -> float:
    """The interval with the highest `renewal_failing`, in hours.

    One save begins when the one before is written; so the interval is at least that long.
    """
    shortest = max(saving.write_hours - saving.save_hours, 1e-6 * saving.mtbf_hours)

    def loss(log_interval: float) -> float:
        return -renewal_failing(saving, math.exp(log_interval))

    found = scipy.optimize.minimize_scalar(
        loss,
        bounds=(math.log(shortest), math.log(max(20 * saving.mtbf_hours, 2 * shortest))),
        method="bounded",
        options={"xatol": 1e-9},
    )
    return math.exp(found.x)


@dataclasses.dataclass(frozen=True)
class Preset:
    name: str
    saving: Saving
    days: float
    source: str  # what is published, and what is assumed


def _observed(name: str, save_hours: float, recovery_hours: float) -> Saving:
    return Saving(OBSERVED[name].mtbf_hours, save_hours, recovery_hours)


PRESETS = {
    "llama3": Preset(
        "Llama 3 405B, 16,384 GPUs",
        _observed("llama3", 3 / 60, 15 / 60),
        54,
        "419 unexpected interruptions in 54 days; saving 3 min and recovery 15 min are assumed. "
        "The paper reports more than 90%: its saving and recovery were faster",
    ),
    "llama3-fast": Preset(
        "Llama 3's failures, faster saving",
        _observed("llama3", 0.01, 0.05),
        54,
        "419 unexpected interruptions in 54 days; saving 36 s and recovery 3 min are assumed",
    ),
    "bloom": Preset(
        "BLOOM 176B, 384 GPUs",
        _observed("bloom", 10 / 60, 1.0),
        105,
        "one or two failures a week; saving 10 min and recovery 1 h are assumed. It saved every "
        "3 h",
    ),
    "bloom-logged": Preset(
        "BLOOM 176B, saving as its log says",
        _observed("bloom", 40 / 3600, 1.0),
        105,
        "one or two failures a week; saving 40 s as logged, recovery 1 h assumed",
    ),
    "opt": Preset(
        "OPT 175B, 992 GPUs",
        _observed("opt", 10 / 60, 1.0),
        60,
        "35 restarts by hand and some 70 without in about 60 days; saving 10 min and recovery "
        "1 h are assumed",
    ),
    "100k": Preset(
        "100,000 chips of 5 years each",
        Saving(cluster_mtbf(5, 100_000), 1 / 60, 5 / 60),
        54,
        "all assumed: 5 years between failures of a chip, saving 1 min, recovery 5 min",
    ),
}
