"""`palm-jax lab fit`."""

from __future__ import annotations

import collections.abc
import csv
import dataclasses
import math
import pathlib
import sys
import time
from typing import Annotated, Any

import numpy as np
import typer

from palm_jax.cli.plan.showing import positive, show
from palm_jax.cli.terms import AsJson
from palm_jax.errors import WrongInput
from palm_jax.lab import fit as fitting
from palm_jax.lab import fit_picture
from palm_jax.plan import page
from palm_jax.plan.answer import Answer, Table, number, pairs

USUAL_STARTS = 100


def fit(
    losses: Annotated[
        pathlib.Path,
        typer.Argument(metavar="LOSSES", help="A CSV with columns parameters, tokens, loss."),
    ],
    law: Annotated[str, typer.Option(help="chinchilla or kaplan.")] = "chinchilla",
    flops: Annotated[
        float | None, typer.Option(help="A budget, whose best size and tokens are wanted.")
    ] = None,
    starts: Annotated[
        int, typer.Option(min=1, help="Of the published grid of 4,500; all where it is as many.")
    ] = USUAL_STARTS,
    bootstrap: Annotated[
        int, typer.Option(min=0, help="Times that the runs are drawn again, for intervals.")
    ] = 50,
    seed: Annotated[int, typer.Option(min=0, help="Of what is drawn.")] = 0,
    out: Annotated[
        pathlib.Path | None,
        typer.Option(help="A folder for fit.html and residuals.csv; it is made."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """A scaling law of many runs: constants, how sure they are, and what a budget buys.

    A column `active_parameters` stands for a sparse model's parameters, and `quality` multiplies
    tokens.
    """
    if law not in fitting.FORMS:
        raise WrongInput(f"--law {law}: one of {', '.join(fitting.FORMS)}")
    positive("--flops", flops)
    runs, form = fitting.read(losses), fitting.FORMS[law]
    found = fitting.fit(runs, form, fitting.some(form, starts), _progress("starts"))
    laws = fitting.bootstrap(runs, form, found, bootstrap, seed, _progress("drawn again"))
    budgets = [flops] if flops is not None else _budgets(runs)
    answer = _answer(losses, law, runs, found, laws, budgets)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        _write_residuals(out / "residuals.csv", runs, found.law)
        (out / "fit.html").write_text(page.render(answer), encoding="utf-8")
        answer.figures["page"] = str(out / "fit.html")
    show(answer, as_json)
    if out is not None and not as_json:
        print(f"page: {out / 'fit.html'}")


def _progress(what: str) -> collections.abc.Callable[[int, int], None]:
    """Says on stderr how far it is and how long it will take, at most once in two seconds."""
    began = said = time.monotonic()

    def tell(done: int, total: int) -> None:
        nonlocal said
        now = time.monotonic()
        if done and done < total and now - said > 2:
            said = now
            left = (now - began) / done * (total - done)
            print(f"{what}: {done} of {total}, {left:.0f} s left", file=sys.stderr, flush=True)

    return tell


def _budgets(runs: fitting.Runs) -> list[float]:
    """The largest that was spent, ten times as much, and a hundred times."""
    most = float(np.max(6 * runs.parameters_R * runs.tokens_R))
    return [most, 10 * most, 100 * most]


def _answer(
    losses: pathlib.Path,
    name: str,
    runs: fitting.Runs,
    found: fitting.Fitted,
    laws: list[fitting.Law],
    budgets: list[float],
) -> Answer:
    constants = dataclasses.asdict(found.law)
    intervals = {
        key: fitting.interval(getattr(one, key) for one in laws) if laws else None
        for key in constants
    }
    best = {budget: found.law.optimum(budget) for budget in budgets}
    errors = _errors(runs, found.law)
    figures: dict[str, Any] = {
        "law": name,
        "runs": len(runs),
        "constants": constants,
        "intervals_90_percent": intervals,
        "objective": found.value,
        "starts": found.starts,
        "starts_at_this_minimum": found.ends_alike,
        "root_mean_square_error_log_loss": float(np.sqrt(np.mean(errors**2))),
        "optima": [
            {
                "flops": budget,
                "parameters": one.parameters,
                "tokens": one.tokens,
                "loss_nats_per_token": one.loss_nats,
            }
            for budget, one in best.items()
        ],
    }
    rows = [(key, f"{value:.6g}", _interval(intervals[key])) for key, value in constants.items()]
    tables = (
        Table("Constants", ("", "fitted", "90% of the runs drawn again"), tuple(rows)),
        pairs(
            "",
            ("runs", str(len(runs))),
            (
                "root mean square error of log loss",
                f"{figures['root_mean_square_error_log_loss']:.2%}",
            ),
            ("starts that ended here", f"{found.ends_alike} of {found.starts}"),
        ),
        Table(
            "What budgets buy",
            ("FLOPs", "parameters", "90%", "tokens", "tokens a parameter", "loss"),
            tuple(
                (
                    f"{budget:.3g}",
                    number(one.parameters),
                    _interval(
                        fitting.interval(law.optimum(budget).parameters for law in laws)
                        if laws
                        else None
                    ),
                    number(one.tokens),
                    f"{one.tokens_per_parameter:.1f}",
                    f"{one.loss_nats:.4f}",
                )
                for budget, one in best.items()
            ),
        ),
    )
    assumed = [
        "the sum of Huber losses (delta 1e-3) of log loss is least, by BFGS from many starts "
        "(Hoffmann et al., 2022, approach 3); C = 6ND",
        "each run ended its schedule at its tokens, and all share corpus, tokenizer and recipe",
        "budgets beyond those that were trained are extrapolated; intervals do not know whether "
        "the law holds there",
    ]
    if found.ends_alike == 1 and found.starts > 1:
        assumed.append("one start alone ended here: try --starts 4500")
    drawn = (fit_picture.draw(runs, found.law, str(losses)),)
    return Answer(f"{name}, fitted to {losses}", figures, tables, tuple(assumed), (), drawn)


def _errors(runs: fitting.Runs, law: fitting.Law) -> np.ndarray:
    """Log of observed over predicted loss, of each run."""
    predicted = [law.loss(n, d) for n, d in zip(runs.parameters_R, runs.tokens_R, strict=True)]
    return np.log(runs.loss_R / np.array(predicted))


def _interval(found: tuple[float, float] | None) -> str:
    if found is None:
        return "-"
    form = number if max(found) >= 1e6 else "{:.4g}".format
    return " to ".join("-" if math.isnan(end) else form(end) for end in found)


def _write_residuals(path: pathlib.Path, runs: fitting.Runs, law: fitting.Law) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["parameters", "tokens", "loss", "predicted_loss"])
        for n, d, loss in zip(runs.parameters_R, runs.tokens_R, runs.loss_R, strict=True):
            writer.writerow([f"{n:.10g}", f"{d:.10g}", f"{loss:.10g}", f"{law.loss(n, d):.10g}"])
