"""Scaling laws fitted to losses of many runs (Hoffmann et al., 2022, approach 3).

The sum over runs of Huber(log predicted - log observed), delta = 1e-3, is minimised by BFGS from
every point of a grid, and the best end is kept: a single start often ends in a local minimum.
The sum, not the mean: a mean is so small that BFGS takes its first slope for flat, and stops.
N parameters, D tokens; losses in nats.
"""

from __future__ import annotations

import collections.abc
import csv
import dataclasses
import itertools
import math
import pathlib

import numpy as np
import numpy.typing as npt
import scipy.optimize
import scipy.special

from palm_jax.errors import WrongInput
from palm_jax.plan.scaling_laws import Chinchilla, Kaplan

Array = npt.NDArray[np.float64]
Law = Chinchilla | Kaplan

DELTA = 1e-3  # of log loss: beyond it an error counts by its size, not its square
LEAST_RUNS = 10  # for the five constants of Chinchilla's law, and four of Kaplan's
LEAST_SPREAD = 2.0  # the largest N, and D, over the smallest
LEAST_SCATTER = 0.1  # of log N and log D about a common line, in nats: else they are one variable


@dataclasses.dataclass(frozen=True)
class Runs:
    """What was trained: one entry a run."""

    parameters_R: Array  # of sparse models those that a token meets
    tokens_R: Array  # times the quality of the data
    loss_R: Array

    def __len__(self) -> int:
        return len(self.loss_R)

    def chosen(self, rows: npt.NDArray[np.int64]) -> Runs:
        return Runs(self.parameters_R[rows], self.tokens_R[rows], self.loss_R[rows])


def read(path: pathlib.Path) -> Runs:
    """Runs of a CSV with the columns `parameters`, `tokens` and `loss`.

    `active_parameters`, where there is such a column and it is not empty, stands for a sparse
    model's parameters; `quality` multiplies tokens: of 2 each is worth two.

    Raises:
      WrongInput: it is no such file, a number cannot be, or the runs cannot determine a law.
    """
    rows: list[tuple[float, float, float]] = []
    try:
        with path.open(newline="", encoding="utf-8") as file:
            for number, row in enumerate(csv.DictReader(file), 2):
                rows.append(_row(row, f"{path}:{number}"))
    except OSError as error:
        raise WrongInput(f"{path}: {error.strerror}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise WrongInput(f"{path} is not a CSV: {error}") from error
    columns = np.array(rows, np.float64).reshape(len(rows), 3)
    runs = Runs(columns[:, 0], columns[:, 1], columns[:, 2])
    check(runs, str(path))
    return runs


def _row(row: dict[str, str | None], where: str) -> tuple[float, float, float]:
    def number(name: str, default: str | None = None) -> float:
        text = row.get(name) or default
        if text is None:
            raise WrongInput(f"{where}: there is nothing in column `{name}`")
        try:
            value = float(text)
        except ValueError:
            raise WrongInput(f"{where}: {name} is {text!r}, not a number") from None
        if not (math.isfinite(value) and value > 0):
            raise WrongInput(f"{where}: {name} is {text}; it must be finite and above 0")
        return value

    parameters = number("active_parameters", row.get("parameters"))
    return parameters, number("tokens") * number("quality", "1"), number("loss")


def check(runs: Runs, where: str) -> None:
    """Raise WrongInput if no law can be told from these runs."""
    if len(runs) < LEAST_RUNS:
        raise WrongInput(
            f"{where} has {len(runs)} runs; a law of five constants needs at least {LEAST_RUNS}"
        )
    log_N, log_D = np.log(runs.parameters_R), np.log(runs.tokens_R)
    for name, logs in (("parameters", log_N), ("tokens", log_D)):
        if np.ptp(logs) < math.log(LEAST_SPREAD):
            raise WrongInput(
                f"{where}: the largest number of {name} is {math.exp(np.ptp(logs)):.2f} times the "
                f"smallest; a law needs at least {LEAST_SPREAD:g}"
            )
    centred = np.stack([log_N - log_N.mean(), log_D - log_D.mean()])
    scatter = np.linalg.svd(centred, compute_uv=False)[-1] / math.sqrt(len(runs))
    if scatter < LEAST_SCATTER:
        raise WrongInput(
            f"{where}: tokens follow from parameters (in log they lie {scatter:.3f} about one "
            "line), so their effects cannot be told apart; train some sizes on other numbers of "
            "tokens"
        )
    if len(np.unique(runs.loss_R)) < LEAST_RUNS // 2:
        raise WrongInput(f"{where}: only {len(np.unique(runs.loss_R))} different losses")


# --- laws as functions of what is fitted --------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Form:
    """A law's log loss and its gradient in what is fitted (P numbers), and where to begin."""

    # theta [P], log N [R], log D [R] -> log loss [R], its gradient [R, P]
    log_loss: collections.abc.Callable[[Array, Array, Array], tuple[Array, Array]]
    law: collections.abc.Callable[[Array], Law]
    starts: tuple[tuple[float, ...], ...]


def _chinchilla(theta: Array, log_N: Array, log_D: Array) -> tuple[Array, Array]:
    """theta: a, b, e, alpha, beta; log L = logsumexp(a - alpha log N, b - beta log D, e)."""
    a, b, e, alpha, beta = theta
    terms = np.stack([a - alpha * log_N, b - beta * log_D, np.full_like(log_N, e)])
    log_loss = scipy.special.logsumexp(terms, axis=0)
    share = np.exp(terms - log_loss)
    gradient = np.stack([share[0], share[1], share[2], -share[0] * log_N, -share[1] * log_D], 1)
    return log_loss, gradient


def _kaplan(theta: Array, log_N: Array, log_D: Array) -> tuple[Array, Array]:
    """theta: n = log N_c, d = log D_c, r = alpha_N / alpha_D, s = alpha_D;

    log L = s logsumexp(r (n - log N), d - log D).
    """
    n, d, r, s = theta
    terms = np.stack([r * (n - log_N), d - log_D])
    inner = scipy.special.logsumexp(terms, axis=0)
    share = np.exp(terms - inner)
    gradient = np.stack([s * share[0] * r, s * share[1], s * share[0] * (n - log_N), inner], 1)
    return s * inner, gradient


def _grid(*axes: tuple[float, ...]) -> tuple[tuple[float, ...], ...]:
    return tuple(itertools.product(*axes))


_TENS: tuple[float, ...] = (0, 5, 10, 15, 20, 25)
_EXPONENTS: tuple[float, ...] = (0, 0.5, 1, 1.5, 2)
FORMS = {
    # The published grid of 4,500.
    "chinchilla": Form(
        _chinchilla,
        lambda t: Chinchilla(
            E=math.exp(t[2]),
            A=math.exp(t[0]),
            B=math.exp(t[1]),
            alpha=float(t[3]),
            beta=float(t[4]),
        ),
        _grid(_TENS, _TENS, (-1, -0.5, 0, 0.5, 1), _EXPONENTS, _EXPONENTS),
    ),
    "kaplan": Form(
        _kaplan,
        lambda t: Kaplan(
            critical_parameters=math.exp(t[0]),
            critical_tokens=math.exp(t[1]),
            alpha_parameters=float(t[2] * t[3]),
            alpha_tokens=float(t[3]),
        ),
        _grid((20, 25, 30, 35, 40), (20, 25, 30, 35, 40), (0.25, 0.5, 1, 2), (0.05, 0.1, 0.2, 0.4)),
    ),
}


def objective(form: Form, theta: Array, logs: tuple[Array, Array, Array]) -> tuple[float, Array]:
    """The sum of Huber losses, and its gradient [P]; `logs` are those of N, D and loss."""
    log_N, log_D, log_loss = logs
    with np.errstate(over="ignore", invalid="ignore"):
        found, gradient_RP = form.log_loss(theta, log_N, log_D)
        error = found - log_loss
        slope = np.clip(error, -DELTA, DELTA)
        value = float(np.sum(scipy.special.huber(DELTA, error)))
        gradient = slope @ gradient_RP
    if not (math.isfinite(value) and np.all(np.isfinite(gradient))):
        return 1e10, np.zeros_like(theta)  # nowhere: a line search turns back
    return value, gradient


# --- fitting ------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Fitted:
    law: Law
    theta: Array
    value: float  # of the objective
    starts: int
    ends_alike: int  # of the starts, those that reached the same minimum, to a thousandth


def some(form: Form, count: int) -> tuple[tuple[float, ...], ...]:
    """So many of the grid's starts, from all over it; all, if it has no more."""
    return form.starts[:: max(1, len(form.starts) // count)]


def fit(
    runs: Runs,
    form: Form,
    starts: collections.abc.Sequence[collections.abc.Sequence[float]] | None = None,
    tell: collections.abc.Callable[[int, int], None] = lambda done, total: None,
) -> Fitted:
    """The best of the minima that the starts lead to.

    Args:
      starts: of `form`, if None.
      tell: is told how many starts are done, and of how many.
    """
    starts = form.starts if starts is None else starts
    logs = np.log(runs.parameters_R), np.log(runs.tokens_R), np.log(runs.loss_R)
    ends: list[tuple[float, Array]] = []
    for number, start in enumerate(starts):
        tell(number, len(starts))
        found = scipy.optimize.minimize(
            lambda theta: objective(form, theta, logs),
            np.asarray(start, np.float64),
            jac=True,
            method="BFGS",
            options={"gtol": 1e-8, "maxiter": 2000},
        )
        ends.append((float(found.fun), found.x))
    tell(len(starts), len(starts))
    value, theta = min(ends, key=lambda end: end[0])
    # A noiseless law's minimum is 0, to which nothing is near in proportion.
    alike = sum(end <= value * 1.001 + 1e-9 for end, _ in ends)
    return Fitted(form.law(theta), theta, value, len(starts), alike)


def bootstrap(
    runs: Runs,
    form: Form,
    fitted: Fitted,
    times: int,
    seed: int = 0,
    tell: collections.abc.Callable[[int, int], None] = lambda done, total: None,
) -> list[Law]:
    """Laws of as many runs drawn again with replacement, each from the fit and near it."""
    chance = np.random.default_rng(seed)
    laws = []
    for number in range(times):
        tell(number, times)
        drawn = runs.chosen(chance.integers(0, len(runs), len(runs)))
        aside = 1 + 0.1 * chance.standard_normal((2, len(fitted.theta)))
        near = [fitted.theta, *(fitted.theta * aside)]
        laws.append(fit(drawn, form, near).law)
    tell(times, times)
    return laws


def interval(values: collections.abc.Iterable[float], share: float = 0.9) -> tuple[float, float]:
    """The middle `share` of values."""
    low, high = np.quantile(list(values), [(1 - share) / 2, (1 + share) / 2])
    return float(low), float(high)
