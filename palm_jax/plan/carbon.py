"""Energy and its carbon dioxide, and published figures with what each of them counts."""

from __future__ import annotations

import dataclasses

# PaLM, appendix B.2 and table 24: watts of a TPU v4 as measured in training, with its host's share;
# the data centre's power for each watt of a machine; its region's mix of energy.
PALM_WATTS = 378.5
PALM_OVERHEAD = 1.08
PALM_TONNES_PER_MWH = 0.079


@dataclasses.dataclass(frozen=True)
class Carbon:
    machine_mwh: float  # chips and hosts alone
    site_mwh: float  # with cooling and all else: times the overhead (PUE)
    tonnes_co2e: float


def carbon(
    chip_hours: float,
    watts: float = PALM_WATTS,
    overhead: float = PALM_OVERHEAD,
    tonnes_per_mwh: float = PALM_TONNES_PER_MWH,
) -> Carbon:
    """Of chips that drew so many watts each, all the time.

    Source: PaLM, appendix B.2.
    """
    machine = chip_hours * watts / 1e6
    site = machine * overhead
    return Carbon(machine, site, site * tonnes_per_mwh)


@dataclasses.dataclass(frozen=True)
class Published:
    run: str
    tonnes_co2e: float
    by: str  # who says so
    counts: str  # what is in the figure


PUBLISHED = (
    Published(
        "PaLM 540B",
        271.43,
        "PaLM, table 24",
        "measured power of chips and hosts x PUE 1.08 x the grid's mix (89% free of carbon)",
    ),
    Published("GPT-3 175B", 552.0, "PaLM, table 24", "a third party's estimate"),
    Published("GPT-3 175B", 500.0, "OPT, section 6", "another estimate of the same run"),
    Published(
        "OPT 175B",
        75.0,
        "OPT, section 6",
        "estimated, the final run alone; restarts and trials left out",
    ),
    Published(
        "BLOOM 176B", 25.0, "BLOOM, section 6", "433 MWh that the GPUs took for this run alone"
    ),
    Published(
        "BLOOM 176B",
        81.0,
        "BLOOM, section 6",
        "that, 45 t of idle machines, and 11 t of making them",
    ),
)
