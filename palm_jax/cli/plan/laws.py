"""`palm-jax plan batch|chinchilla|carbon`."""

from __future__ import annotations

import pathlib
from typing import Annotated

import typer

from palm_jax import config
from palm_jax.cli.plan.showing import needed, positive, show
from palm_jax.cli.terms import AsJson
from palm_jax.errors import WrongInput
from palm_jax.plan import batch as batches
from palm_jax.plan import carbon as carbons
from palm_jax.plan import flops, parameters, scaling_laws
from palm_jax.plan.answer import Answer, Table, number, pairs

MEASURED_BATCHES = (
    "the noise scale takes the averages of squared gradient norms, over many steps, of two sizes"
)


def batch(
    config_file: Annotated[
        pathlib.Path | None, typer.Argument(metavar="[CONFIG]", help="Whose ramp to look at.")
    ] = None,
    loss: Annotated[
        float | None, typer.Option(help="Nats a token: the critical batch there.")
    ] = None,
    rate: Annotated[float | None, typer.Option(help="A rate that suits --reference-batch.")] = None,
    reference_batch: Annotated[
        float | None, typer.Option(help="In the unit of --batch; see --rate.")
    ] = None,
    to_batch: Annotated[
        float | None, typer.Option("--batch", help="The batch that wants a rate.")
    ] = None,
    norms: Annotated[
        str | None,
        typer.Option(
            metavar="b,B,Nb,NB",
            help="Small batch, large batch, and squared gradient norms over each.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Tokens of a batch ramp, the critical batch, rates by batch, the gradient's noise scale."""
    figures: dict[str, object] = {}
    tables: list[Table] = []
    assumed: list[str] = []
    if config_file is not None:
        settings = config.load(config_file)
        ramp, length = settings.data.ramp, settings.model.sequence_length
        tokens = flops.tokens_by_stage(settings)
        stages = list(zip(ramp.starts, ramp.sizes, tokens, strict=True))
        figures |= {
            "tokens": sum(tokens),
            "stages": [
                {"start_step": start, "batch_sequences": size, "batch_tokens": size * length}
                | {"tokens": of_stage}
                for start, size, of_stage in stages
            ],
        }
        rows = [
            (f"{start:,}", f"{size:,}", number(size * length), f"{of_stage:,}")
            for start, size, of_stage in stages
        ]
        rows.append(("all", "", "", f"{sum(tokens):,}"))
        headings = ("from step", "sequences", "tokens a step", "tokens")
        tables.append(Table("The ramp", headings, tuple(rows)))
    if positive("--loss", loss) is not None:
        assert loss is not None
        critical = scaling_laws.critical_batch(loss)
        figures |= {"loss_nats_per_token": loss, "critical_batch_tokens": critical}
        row = (f"critical batch at a loss of {loss:g}", f"{number(critical)} tokens")
        tables.append(pairs("", row))
        assumed.append(
            "the critical batch is Kaplan et al.'s fit, 2e8 / L^(1/0.21), of their models, corpus "
            "and tokenizer. Up to it, a batch twice as large halves the steps; beyond it, less "
            "and less"
        )
    if rate is not None or to_batch is not None or reference_batch is not None:
        why = "--rate, --reference-batch and --batch go together"
        at = needed("--rate", rate, why)
        reference = needed("--reference-batch", reference_batch, why)
        wanted = needed("--batch", to_batch, why)
        found = batches.rate_for_batch(at, wanted, reference)
        figures |= {"rate": found}
        tables.append(pairs("", (f"rate for a batch of {wanted:g}", f"{found:.6g}")))
        assumed.append("rates follow the square root of the batch, as Adam's noise does")
    if norms is not None:
        figures |= _noise(norms, tables)
        assumed.append(MEASURED_BATCHES)
    if not figures:
        raise WrongInput("plan batch: give a CONFIG, or --loss, or --rate, or --norms")
    show(Answer("Batches", figures, tuple(tables), tuple(assumed)), as_json)


def _noise(text: str, tables: list[Table]) -> dict[str, float]:
    try:
        small, large, small_norm, large_norm = map(float, text.split(","))
    except ValueError:
        raise WrongInput(f"--norms {text}: give four numbers, b,B,Nb,NB") from None
    found = batches.noise_scale(small, large, small_norm, large_norm)
    if found.squared_gradient <= 0:
        raise WrongInput(
            f"--norms {text}: the larger batch's norm is so small that no gradient is left in the "
            "noise; average over more steps"
        )
    tables.append(
        pairs(
            "",
            ("squared gradient", number(found.squared_gradient)),
            ("variance of one example", number(found.variance)),
            ("noise scale, as a batch", number(found.batch)),
        )
    )
    return {
        "squared_gradient": found.squared_gradient,
        "variance": found.variance,
        "noise_scale_batch": found.batch,
    }


def chinchilla(
    config_file: Annotated[
        pathlib.Path | None, typer.Argument(metavar="[CONFIG]", help="Whose size and tokens.")
    ] = None,
    budget: Annotated[
        float | None, typer.Option("--flops", help="Training FLOPs; the default: CONFIG's 6ND.")
    ] = None,
    size: Annotated[float | None, typer.Option("--parameters", help="A model to look at.")] = None,
    tokens: Annotated[float | None, typer.Option(help="What it trains on.")] = None,
    tokens_read: Annotated[
        float | None,
        typer.Option(help="Tokens that the model will read and write once it is trained."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """The best size and tokens for a budget, under three sets of constants of the same law."""
    if config_file is not None:
        settings = config.load(config_file)
        size = size or float(parameters.number(settings.model))
        tokens = tokens or float(sum(flops.tokens_by_stage(settings)))
    for option, value in (
        ("--flops", budget),
        ("--parameters", size),
        ("--tokens", tokens),
        ("--tokens-read", tokens_read),
    ):
        positive(option, value)
    if (size is None) != (tokens is None):
        raise WrongInput("--parameters and --tokens go together")
    if budget is None:
        if size is None or tokens is None:
            raise WrongInput(
                "plan chinchilla: give a CONFIG, --flops, or --parameters and --tokens"
            )
        budget = scaling_laws.FLOPS_PER_PARAMETER_AND_TOKEN * size * tokens
    laws = scaling_laws.CHINCHILLA
    best = {name: law.optimum(budget) for name, law in laws.items()}
    figures: dict[str, object] = {
        "flops": budget,
        "laws": {
            name: {
                "parameters": best[name].parameters,
                "tokens": best[name].tokens,
                "tokens_per_parameter": best[name].tokens_per_parameter,
                "loss_nats_per_token": best[name].loss_nats,
                "parameter_exponent": law.parameter_exponent,
            }
            for name, law in laws.items()
        },
    }
    rows = [
        ("parameters", *(number(one.parameters) for one in best.values())),
        ("tokens", *(number(one.tokens) for one in best.values())),
        ("tokens a parameter", *(f"{one.tokens_per_parameter:.1f}" for one in best.values())),
        ("loss", *(f"{one.loss_nats:.4f}" for one in best.values())),
        ("exponent a of the size", *(f"{law.parameter_exponent:.4f}" for law in laws.values())),
    ]
    tables = [Table(f"The best for {budget:.4g} FLOPs", ("", *laws), tuple(rows))]
    if size is not None and tokens is not None:
        losses = {name: law.loss(size, tokens) for name, law in laws.items()}
        figures["given"] = {
            "parameters": size,
            "tokens": tokens,
            "loss_nats_per_token": losses,
        }
        title = f"{number(size)} parameters on {number(tokens)} tokens"
        row = ("loss", *(f"{loss:.5f}" for loss in losses.values()))
        tables.append(Table(title, ("", *laws), (row,)))
    if tokens_read is not None:
        used = {
            name: law.optimum_with_inference(best[name].loss_nats, tokens_read)
            for name, law in laws.items()
        }
        figures["with_inference"] = {
            name: {
                "parameters": one.parameters,
                "tokens": one.tokens,
                "tokens_per_parameter": one.tokens_per_parameter,
            }
            for name, one in used.items()
        }
        rows = [
            ("parameters", *(number(one.parameters) for one in used.values())),
            ("tokens", *(number(one.tokens) for one in used.values())),
            ("tokens a parameter", *(f"{one.tokens_per_parameter:.1f}" for one in used.values())),
        ]
        title = f"The same loss, cheapest with {number(tokens_read)} tokens read afterwards"
        tables.append(Table(title, ("", *laws), tuple(rows)))
    assumed = (
        "L = E + A/N^alpha + B/D^beta and C = 6ND (Hoffmann et al., 2022): of its corpus and "
        "tokenizer, one pass over the data, attention's FLOPs left out",
        "printed: the paper's constants as printed; unrounded: as in its source; refitted: "
        "Besiroglu et al. (2024), from its own figures. They disagree by more than most budgets "
        "can tell apart",
    )
    show(Answer("Scaling laws", figures, tuple(tables), assumed), as_json)


def carbon(
    chip_hours: Annotated[
        float | None, typer.Option(help="Default: PaLM 540B's, 8,404,992.")
    ] = None,
    watts: Annotated[
        float, typer.Option(help="Of a chip in training, with its share of the host.")
    ] = carbons.PALM_WATTS,
    overhead: Annotated[
        float, typer.Option(help="The data centre's power for each watt (PUE).")
    ] = carbons.PALM_OVERHEAD,
    tonnes_per_mwh: Annotated[
        float, typer.Option(help="Of carbon dioxide, of the local mix.")
    ] = carbons.PALM_TONNES_PER_MWH,
    as_json: AsJson = False,
) -> None:
    """Energy and carbon dioxide of chip-hours, beside published figures and what they count."""
    from palm_jax.plan import published

    given = chip_hours if chip_hours is not None else published.PALM_540B.chip_hours
    positive("--chip-hours", given)
    positive("--watts", watts)
    positive("--tonnes-per-mwh", tonnes_per_mwh)
    if not overhead >= 1:
        raise WrongInput(f"--overhead {overhead:g}: a site uses at least what its machines use, 1")
    found = carbons.carbon(given, watts, overhead, tonnes_per_mwh)
    figures = {
        "chip_hours": given,
        "machine_mwh": found.machine_mwh,
        "site_mwh": found.site_mwh,
        "tonnes_co2e": found.tonnes_co2e,
        "published": [
            {
                "run": one.run,
                "tonnes_co2e": one.tonnes_co2e,
                "by": one.by,
                "counts": one.counts,
            }
            for one in carbons.PUBLISHED
        ],
    }
    here = pairs(
        "",
        ("chip-hours", f"{given:,.0f}"),
        ("energy of the machines", f"{found.machine_mwh:,.1f} MWh"),
        ("energy of the site", f"{found.site_mwh:,.1f} MWh"),
        ("carbon dioxide", f"{found.tonnes_co2e:,.2f} t"),
    )
    others = Table(
        "Published; no two count the same",
        ("run", "t CO2e", "by", "counts"),
        tuple((p.run, f"{p.tonnes_co2e:g}", p.by, p.counts) for p in carbons.PUBLISHED),
    )
    assumed = (
        f"{watts:g} W a chip all the time, PUE {overhead:g}, {tonnes_per_mwh:g} t/MWh; the "
        "defaults are PaLM's (appendix B, table 24)",
        "making and idling of machines left out",
    )
    show(Answer("Energy and carbon dioxide", figures, (here, others), assumed), as_json)
