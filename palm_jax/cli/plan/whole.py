"""`palm-jax plan run`."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Annotated, Any

import typer

from palm_jax import config
from palm_jax.cli.plan.compute import MFU_ASSUMED, Config
from palm_jax.cli.plan.showing import needed, positive, show
from palm_jax.cli.terms import AsJson, Overrides, in_bytes
from palm_jax.errors import WrongInput
from palm_jax.plan import carbon, page, pictures, published
from palm_jax.plan import run as planning
from palm_jax.plan.answer import Answer, Table, hours, number, pairs
from palm_jax.plan.memory import DeviceBytes
from palm_jax.tpu import topologies

USUAL_MFU = 0.45


def run(
    config_file: Config,
    topology: Annotated[
        str, typer.Option(metavar="KIND:AxB", help="One slice: v4:12x16x16, v5e:4x4, ...")
    ],
    overrides: Overrides = None,
    slices: Annotated[int, typer.Option(min=1, help="Slices of that topology.")] = 1,
    utilisation: Annotated[
        float | None, typer.Option(help=f"Of the peak, assumed; default {USUAL_MFU}.")
    ] = None,
    tokens_per_second: Annotated[
        float | None, typer.Option(help="Instead: a rate that was measured.")
    ] = None,
    chip_mtbf_years: Annotated[
        float, typer.Option(help="Between failures of one chip.")
    ] = planning.Machines.chip_mtbf_years,
    recovery_hours: Annotated[
        float, typer.Option(min=0, help="From a failure until training goes on.")
    ] = planning.Machines.recovery_hours,
    write_gb_s: Annotated[
        float, typer.Option(help="GB/s that a host writes to where checkpoints stay.")
    ] = planning.Machines.write_bytes_s / 1e9,
    contingency: Annotated[
        float, typer.Option(help="To put by for spikes, trials and what nobody thought of.")
    ] = 0.1,
    watts: Annotated[float, typer.Option(help="Of a chip, with its host.")] = carbon.PALM_WATTS,
    html: Annotated[
        pathlib.Path | None, typer.Option(help="Where a page of all this goes, with pictures.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """One page about a run of CONFIG: memory, days, failures, checkpoints, energy, what to book."""
    from palm_jax import sharding
    from palm_jax.plan import activations, memory

    settings = config.load(config_file, [*(overrides or ()), "mesh.emulated_devices=null"])
    slice_ = topologies.parse(topology, slices)
    mesh = settings.mesh
    if (size := mesh.data_parallel * mesh.tensor) != slice_.num_chips:
        raise WrongInput(
            f"mesh.data x mesh.fsdp x mesh.tensor = {mesh.data} x {mesh.fsdp} x {mesh.tensor} = "
            f"{size}, but --topology and --slices have {slice_.num_chips} chips; make them equal"
        )
    for option, value in (
        ("--utilisation", utilisation),
        ("--tokens-per-second", tokens_per_second),
        ("--watts", watts),
    ):
        positive(option, value)
    if utilisation is None and tokens_per_second is None:
        utilisation = USUAL_MFU
    machines = planning.Machines(
        chips=slice_.num_chips,
        peak_flops=slice_.chip.peak_flops,
        hbm_bytes=slice_.chip.hbm,
        chip_mtbf_years=needed("--chip-mtbf-years", chip_mtbf_years, ""),
        recovery_hours=recovery_hours,
        write_bytes_s=needed("--write-gb-s", write_gb_s, "") * 1e9,
    )
    whole = planning.plan(
        settings,
        machines,
        mfu=utilisation,
        tokens_per_second=tokens_per_second,
        contingency=contingency,
        watts=watts,
    )
    kept = memory.on_each_device(settings, sharding.RULES)
    passing = activations.on_each_device(settings, sharding.RULES)
    answer = _answer(
        str(config_file),
        topology,
        slices,
        whole,
        machines,
        kept,
        passing,
        published.of(settings.model),
        utilisation is not None,
        watts,
    )
    if html is not None:
        html.write_text(page.render(answer), encoding="utf-8")
        answer.figures["page"] = str(html)
    show(answer, as_json)
    if html is not None and not as_json:
        print(f"page: {html}")


def _answer(
    name: str,
    topology: str,
    slices: int,
    whole: planning.Whole,
    machines: planning.Machines,
    kept: DeviceBytes,
    passing: Any,
    beside: published.Published | None,
    is_assumed: bool,
    watts: float,
) -> Answer:
    from palm_jax.plan import activations

    needed_bytes = kept.arguments + passing.total
    fits = needed_bytes <= machines.hbm_bytes
    fields = dataclasses.asdict(whole)
    saving, energy = fields.pop("saving"), fields.pop("energy")
    figures: dict[str, Any] = {
        **fields,
        **saving,
        **energy,
        "topology": topology,
        "slices": slices,
        "state_and_batch_bytes_per_chip": kept.arguments,
        "temporary_bytes_per_chip": passing.total,
        "bytes_per_chip": needed_bytes,
        "hbm_bytes_per_chip": machines.hbm_bytes,
        "fits": fits,
    }
    where = f"{slices} x {topology}" if slices > 1 else topology
    memory_row = (
        f"{in_bytes(needed_bytes)} of {in_bytes(machines.hbm_bytes)}"
        f"{'' if fits else ': does not fit'}"
    )
    tables = [
        pairs(
            "",
            ("parameters", f"{whole.parameters:,}"),
            ("chips", f"{whole.chips:,}, {where}"),
            ("memory of a chip", memory_row),
            ("tokens", f"{whole.tokens:,}"),
            ("FLOPs of training", f"{whole.train_flops:.4g}"),
            ("utilisation, of model and hardware", f"{whole.mfu:.1%}, {whole.hfu:.1%}"),
            ("tokens a second", f"{whole.tokens_per_second:,.0f}"),
            ("days of steps alone", f"{whole.days:.1f}"),
            ("  chip-hours", f"{whole.chip_hours:,.0f}"),
        ),
        Table(
            "The ramp",
            ("from step", "sequences", "tokens", "a step", "days"),
            tuple(
                (
                    f"{s.start_step:,}",
                    f"{s.batch_sequences:,}",
                    number(s.tokens),
                    f"{s.step_seconds:.2f} s",
                    f"{s.days:.1f}",
                )
                for s in whole.stages
            ),
        ),
        pairs(
            "Failures",
            ("a checkpoint", f"{whole.checkpoint_bytes / 1e12:.2f} TB"),
            (
                "  holds up the loop, and is written for",
                f"{hours(whole.saving.save_hours)}, {hours(whole.saving.write_hours)}",
            ),
            ("between failures", hours(whole.saving.mtbf_hours)),
            ("interruptions", f"{whole.interruptions:.0f}"),
            (
                "best interval of checkpoints",
                f"{hours(whole.interval_hours)}, {whole.interval_steps:,} of the largest steps",
            ),
            ("  goodput", f"{whole.goodput:.1%}"),
            (
                f"  with checkpoint.every={whole.configured_steps}",
                f"{whole.goodput_as_configured:.1%}",
            ),
            ("days with failures", f"{whole.days_with_failures:.1f}"),
            ("  chip-hours", f"{whole.chip_hours_with_failures:,.0f}"),
        ),
        pairs(
            "To book",
            (
                f"chip-hours, with {whole.contingency:.0%} put by",
                f"{whole.chip_hours_to_book:,.0f}",
            ),
            ("energy of the site", f"{whole.energy.site_mwh:,.0f} MWh"),
            ("carbon dioxide", f"{whole.energy.tonnes_co2e:,.0f} t"),
        ),
    ]
    if beside is not None:
        figures["published"] = {
            "name": beside.name,
            "chip_hours": beside.chip_hours,
            "chip_hours_at_measured_rate": beside.measured_chip_hours,
            "ratio": beside.ratio,
            "hypotheses": list(beside.hypotheses),
        }
        tables.append(_published(beside))
    assumed = [
        MFU_ASSUMED,
        f"{'utilisation assumed' if is_assumed else 'rate as given'}, the same at every batch size",
        f"a chip fails every {machines.chip_mtbf_years:g} years and stops all; recovery "
        f"{hours(machines.recovery_hours)}; a host of {machines.chips_per_host} chips hands over "
        f"{machines.to_host_bytes_s / 1e9:g} GB/s and writes {machines.write_bytes_s / 1e9:g} GB/s",
        "goodput at the best interval, by the renewal form, recovery failing too "
        "(palm-jax plan goodput)",
        f"{watts:g} W a chip, PUE and mix of PaLM (palm-jax plan carbon), for the hours with "
        "failures",
        *activations.ASSUMED,
    ]
    drawn = (
        pictures.bars(
            "GiB of a chip",
            {
                **{
                    n.replace("_", " "): sum(g.values()) / 2**30
                    for n, g in kept.arrays.items()
                    if n != "gradient"
                },
                **{n: size / 2**30 for n, size in passing.parts.items()},
            },
            "GiB",
        ),
        pictures.sensitivity(whole.saving),
    )
    hypotheses = () if beside is None else beside.hypotheses
    title = f"{name} on {where}"
    return Answer(title, figures, tuple(tables), tuple(assumed), hypotheses, drawn)


def _published(run: published.Published) -> Table:
    rows = [
        ("chip-hours that it held", f"{run.chip_hours:,.0f}"),
        (
            f"at its measured {run.tokens_per_second:,.0f} tokens a second",
            f"{run.measured_chip_hours:,.0f}",
        ),
        ("ratio", f"{run.ratio:.2f}"),
    ]
    return Table(f"{run.name} as published ({run.source})", ("", ""), tuple(rows))
