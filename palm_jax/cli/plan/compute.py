"""`palm-jax plan flops|memory|kv`."""

from __future__ import annotations

import pathlib
from typing import Annotated, Any

import typer

from palm_jax import config
from palm_jax.cli.plan.showing import positive, show
from palm_jax.cli.terms import AsJson, Overrides, in_bytes
from palm_jax.errors import WrongInput
from palm_jax.plan import cache, flops
from palm_jax.plan import parameters as counting
from palm_jax.plan.answer import Answer, Table, number, pairs, percent

ConfigOrNone = Annotated[
    pathlib.Path | None, typer.Argument(metavar="[CONFIG]", help="A YAML file.")
]
Config = Annotated[pathlib.Path, typer.Argument(metavar="CONFIG", help="A YAML file.")]

MFU_ASSUMED = (
    "6N + 12LHQT FLOPs a token (PaLM, appendix B): attention as if it were not causal, N with the "
    "embedding, without rows that pad it; utilisation is of the peak in bfloat16"
)


def flops_command(
    config_file: ConfigOrNone = None,
    overrides: Overrides = None,
    tokens_per_second: Annotated[
        float | None, typer.Option(help="Of all chips: every target token of a step.")
    ] = None,
    utilisation: Annotated[
        float | None, typer.Option(help="Instead of a rate: the share of the peak, as 0.46.")
    ] = None,
    chips: Annotated[int | None, typer.Option(help="Default: those of CONFIG's mesh.")] = None,
    peak_tflops: Annotated[
        float | None, typer.Option(help="Of a chip, bfloat16: 275 for TPU v4.")
    ] = None,
    tokens: Annotated[
        float | None, typer.Option(help="To train on; default: those of CONFIG's ramp.")
    ] = None,
    parameters: Annotated[float | None, typer.Option(help="Without a CONFIG: N.")] = None,
    layers: Annotated[int, typer.Option(help="Without a CONFIG.")] = 0,
    heads: Annotated[int, typer.Option(help="Without a CONFIG.")] = 0,
    head_size: Annotated[int, typer.Option(help="Without a CONFIG.")] = 0,
    sequence: Annotated[int, typer.Option(help="Without a CONFIG: tokens.")] = 0,
    remat: Annotated[str, typer.Option(help="Without a CONFIG: none, attention, full.")] = "none",
    as_json: AsJson = False,
) -> None:
    """FLOPs a token and step, utilisation, time and chip-hours."""
    for option, value in (
        ("--tokens-per-second", tokens_per_second),
        ("--utilisation", utilisation),
        ("--chips", chips),
        ("--peak-tflops", peak_tflops),
        ("--tokens", tokens),
        ("--parameters", parameters),
    ):
        positive(option, value)
    assumed = [MFU_ASSUMED]
    if remat not in flops.RECOMPUTED:
        raise WrongInput(f"--remat {remat}: one of {', '.join(flops.RECOMPUTED)}")
    if config_file is not None:
        settings = config.load(config_file, overrides or ())
        model, remat = settings.model, settings.model.remat
        name, count = str(config_file), float(counting.number(model))
        needed, done = flops.train_flops_per_token(model), flops.hardware_flops_per_token(model)
        tokens = tokens or float(sum(flops.tokens_by_stage(settings)))
        chips = chips or settings.mesh.data_parallel * settings.mesh.tensor
        largest: int | None = max(settings.data.ramp.sizes) * model.sequence_length
    else:
        if parameters is None:
            raise WrongInput("plan flops: give a CONFIG, or --parameters (and --layers, ...)")
        shape = (layers, heads, head_size, sequence)
        if any(shape) and not all(size > 0 for size in shape):
            raise WrongInput("--layers, --heads, --head-size and --sequence go together, above 0")
        name, count, largest = f"{number(parameters)} parameters", parameters, None
        dense, attention = flops.RECOMPUTED[remat]
        needed = flops.flops_per_token(int(parameters), *shape)
        done = flops.flops_per_token(
            int(parameters), *shape, recomputed_dense=dense, recomputed_attention=attention
        )
        if not any(shape):
            assumed.append("attention's own products left out: no shape is given")
    figures: dict[str, Any] = {
        "parameters": count,
        "flops_per_token": needed,
        "hardware_flops_per_token": done,
        "remat": remat,
    }
    rows: list[tuple[str, str] | None] = [
        ("parameters", f"{count:,.0f}"),
        ("FLOPs a token", f"{needed:.6e}"),
        (f"  with what remat={remat} repeats", f"{done:.6e}"),
    ]
    if largest is not None:
        figures["flops_per_step"] = needed * largest
        rows.append((f"FLOPs a step of {largest:,} tokens", f"{needed * largest:.4e}"))
    if tokens is not None:
        figures |= {"tokens": tokens, "train_flops": needed * tokens}
        rows += [("tokens", f"{tokens:,.0f}"), ("FLOPs of training", f"{needed * tokens:.4e}")]
    if tokens_per_second is not None and utilisation is not None:
        raise WrongInput("--tokens-per-second and --utilisation: give one of them")
    if tokens_per_second is not None or utilisation is not None:
        if chips is None or peak_tflops is None:
            raise WrongInput("a rate or a utilisation needs --chips and --peak-tflops")
        if utilisation is not None and utilisation > 1:
            raise WrongInput(f"--utilisation {utilisation:g}: a share of the peak is at most 1")
        peak = peak_tflops * 1e12
        rate = tokens_per_second
        if rate is None:
            assert utilisation is not None
            rate = flops.rate_at(utilisation, needed, chips, peak)
        found = flops.Throughput(needed, done, rate, chips, peak, tokens)
        if found.hfu > 1:
            raise WrongInput(
                f"{rate:g} tokens a second would be {found.hfu:.1%} of the peak of {chips:,} "
                f"chips of {peak_tflops:g} TFLOP/s; check all three"
            )
        figures |= {
            "chips": chips,
            "peak_tflops": peak_tflops,
            "tokens_per_second": rate,
            "mfu": found.mfu,
            "hfu": found.hfu,
            "step_seconds": None if largest is None else largest / rate,
            "days": None if found.seconds is None else found.seconds / 86400,
            "chip_hours": found.chip_hours,
        }
        rows += [
            ("tokens a second", f"{rate:,.0f}"),
            ("model FLOPs utilisation", f"{found.mfu:.2%}"),
            ("hardware FLOPs utilisation", f"{found.hfu:.2%}"),
            None if largest is None else ("seconds a step", f"{largest / rate:.2f}"),
            None if found.seconds is None else ("days", f"{found.seconds / 86400:.1f}"),
            None if found.chip_hours is None else ("chip-hours", f"{found.chip_hours:,.0f}"),
        ]
        if found.seconds is not None:
            assumed.append("days and chip-hours at this rate throughout: nothing fails or waits")
    if remat == "full":
        assumed.append(
            "remat=full repeats 75% of the forward pass's products with weights and all of "
            "attention's (PaLM, appendix B)"
        )
    show(Answer(name, figures, (pairs("", *rows),), tuple(assumed)), as_json)


def kv(
    config_file: ConfigOrNone = None,
    overrides: Overrides = None,
    tokens: Annotated[int, typer.Option(help="In the cache: of all sequences together.")] = 2048,
    bytes_per_element: Annotated[int, typer.Option(help="2: bfloat16.")] = 2,
    layers: Annotated[int | None, typer.Option(help="Without a CONFIG.")] = None,
    heads: Annotated[int | None, typer.Option(help="Without a CONFIG: heads of keys.")] = None,
    head_size: Annotated[int | None, typer.Option(help="Without a CONFIG.")] = None,
    as_json: AsJson = False,
) -> None:
    """Bytes of keys and values that decoding keeps, against the weights."""
    positive("--tokens", tokens)
    positive("--bytes-per-element", bytes_per_element)
    if config_file is None:
        if layers is None or heads is None or head_size is None:
            raise WrongInput("plan kv: give a CONFIG, or --layers, --heads and --head-size")
        for option, value in (("--layers", layers), ("--heads", heads), ("--head-size", head_size)):
            positive(option, value)
        one = cache.bytes_per_token(layers, heads, head_size, bytes_per_element)
        row = (f"{one:,} bytes", in_bytes(one * tokens))
        plain = Table("", ("a token", f"{tokens:,} tokens"), (row,))
        figures: dict[str, Any] = {"bytes_per_token": one, "cache_bytes": one * tokens}
        show(Answer("Keys and values", figures | {"tokens": tokens}, (plain,), ()), as_json)
        return
    model = config.load(config_file, overrides or ()).model
    found = cache.caches(model, tokens, bytes_per_element)
    mine = next(one for one in found.values() if one.heads_of_keys == model.num_key_value_heads)
    figures = {
        "bytes_per_token": mine.bytes_per_token,
        "cache_bytes": mine.cache_bytes,
        "tokens": tokens,
        "weight_bytes": mine.weight_bytes,
        "kinds": {
            kind: {"bytes_per_token": one.bytes_per_token, "cache_bytes": one.cache_bytes}
            | {"tokens_like_weights": one.tokens_like_weights}
            for kind, one in found.items()
        },
    }
    rows = tuple(
        (
            f"{kind}{' (this config)' if one is mine else ''}",
            f"{one.bytes_per_token:,}",
            f"{one.cache_bytes / 1e9:,.3f}",
            f"{one.tokens_like_weights:,.0f}",
        )
        for kind, one in found.items()
    )
    headings = (
        "attention",
        "bytes a token",
        f"GB for {tokens:,} tokens",
        "tokens that weigh as much as the weights",
    )
    assumed = (
        f"{bytes_per_element} bytes an element; weights {mine.weight_bytes / 1e9:,.1f} GB, all of "
        "which a step of decoding reads once, whatever the batch",
        "GB are 10^9 bytes",
    )
    show(Answer(str(config_file), figures, (Table("", headings, rows),), assumed), as_json)


def memory(
    config_file: Config,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Bytes on each chip by group, for CONFIG's mesh: state, gradient, activations and buffers."""
    from palm_jax import sharding
    from palm_jax.plan import activations
    from palm_jax.plan import memory as planning

    settings = config.load(config_file, [*(overrides or ()), "mesh.emulated_devices=null"])
    kept = planning.on_each_device(settings, sharding.RULES)
    passing = activations.on_each_device(settings, sharding.RULES)
    state = {name: sum(groups.values()) for name, groups in kept.arrays.items()}
    del state["gradient"]  # it lies among the temporaries
    total = kept.arguments + passing.total
    mesh = settings.mesh
    figures = {
        "chips": mesh.data_parallel * mesh.tensor,
        "mesh": {"data": mesh.data, "fsdp": mesh.fsdp, "tensor": mesh.tensor},
        "argument_bytes": kept.arguments,
        "temporary_bytes": passing.total,
        "total_bytes": total,
        "state_bytes": state | {"counters": kept.counters},
        "batch_bytes": kept.batch,
        "temporaries_bytes": passing.parts,
    }
    rows = [
        (name.replace("_", " "), in_bytes(size), percent(size / total))
        for name, size in [*state.items(), ("batch", kept.batch)]
    ]
    rows.append(("state and batch", in_bytes(kept.arguments), percent(kept.arguments / total)))
    rows += [(name, in_bytes(size), percent(size / total)) for name, size in passing.parts.items()]
    rows += [
        ("temporaries", in_bytes(passing.total), percent(passing.total / total)),
        ("all", in_bytes(total), "100.0%"),
    ]
    shape = f"{mesh.data} x {mesh.fsdp} x {mesh.tensor}"
    table = Table(f"On each of {shape} chips", ("", "bytes", "share"), tuple(rows))
    show(Answer(str(config_file), figures, (table,), activations.ASSUMED), as_json)
