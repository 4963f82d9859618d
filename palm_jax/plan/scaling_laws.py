"""Loss as a function of parameters and tokens, and what a budget of compute buys.

N parameters, D training tokens, C = 6 N D training FLOPs. Losses are in nats per token, of the
tokenizer and corpus that each law was fitted on: compare differences, not values, with your own.
"""

from __future__ import annotations

import dataclasses
import math

import scipy.optimize

from palm_jax.errors import WrongInput

FLOPS_PER_PARAMETER_AND_TOKEN = 6  # forward and backward, without attention
FLOPS_PER_PARAMETER_AND_TOKEN_READ = 2  # forward alone


@dataclasses.dataclass(frozen=True)
class Chinchilla:
    """L = E + A / N^alpha + B / D^beta (Hoffmann et al., 2022, section 3.3)."""

    E: float
    A: float
    B: float
    alpha: float
    beta: float

    def loss(self, num_parameters: float, tokens: float) -> float:
        return self.E + self.A / num_parameters**self.alpha + self.B / tokens**self.beta

    @property
    def parameter_exponent(self) -> float:
        """a of the best N = G (C / 6)^a."""
        return self.beta / (self.alpha + self.beta)

    def optimum(self, flops: float) -> Optimum:
        """The parameters and tokens with the lowest loss for a training budget.

        Source: Hoffmann et al., equation 4.
        """
        ratio = (self.alpha * self.A) / (self.beta * self.B)
        budget = flops / FLOPS_PER_PARAMETER_AND_TOKEN
        scale = ratio ** (1 / (self.alpha + self.beta))
        num_parameters = scale * budget**self.parameter_exponent
        tokens = budget / num_parameters
        return Optimum(num_parameters, tokens, self.loss(num_parameters, tokens))

    def tokens_for(self, loss: float, num_parameters: float) -> float:
        """Tokens after which a model of this size reaches a loss; infinite where none is enough."""
        left = loss - self.E - self.A / num_parameters**self.alpha
        return math.inf if left <= 0 else (self.B / left) ** (1 / self.beta)

    def optimum_with_inference(self, loss: float, tokens_read: float) -> Optimum:
        """The model that reaches a loss with the fewest FLOPs, its later use included.

        6 N D for training it, and 2 N for each token that it will read or write.

        Args:
          tokens_read: in the model's whole life.
        Raises:
          WrongInput: no model reaches the loss.
        Source: Sardana et al., 2024 (Beyond Chinchilla-Optimal), equation 2.
        """
        if loss <= self.E:
            raise WrongInput(
                f"loss {loss:g}: this law ends at {self.E:g} whatever the size; give a higher loss"
            )
        smallest = math.log(self.A / (loss - self.E)) / self.alpha  # needs infinitely many tokens

        def log_cost(log_parameters: float) -> float:
            num_parameters = math.exp(log_parameters)
            tokens = self.tokens_for(loss, num_parameters)
            return log_parameters + math.log(
                FLOPS_PER_PARAMETER_AND_TOKEN * tokens
                + FLOPS_PER_PARAMETER_AND_TOKEN_READ * tokens_read
            )

        # Of one valley: beyond exp(20) times the smallest size the cost rises as N.
        found = scipy.optimize.minimize_scalar(
            log_cost,
            bounds=(smallest + 1e-6, smallest + 20),
            method="bounded",
            options={"xatol": 1e-9},
        )
        num_parameters = math.exp(found.x)
        return Optimum(num_parameters, self.tokens_for(loss, num_parameters), loss)


@dataclasses.dataclass(frozen=True)
class Optimum:
    parameters: float
    tokens: float
    loss_nats: float

    @property
    def tokens_per_parameter(self) -> float:
        return self.tokens / self.parameters


# The same experiments three times. Besiroglu et al. (2024) found that the constants as printed do
# not follow from the paper's own runs: their rounding alone moves the optimum, and a fit of the
# runs gives others again.
CHINCHILLA = {
    "printed": Chinchilla(E=1.69, A=406.4, B=410.7, alpha=0.34, beta=0.28),
    "unrounded": Chinchilla(
        E=math.exp(0.526723),
        A=math.exp(6.00734),
        B=math.exp(6.01792),
        alpha=0.339171,
        beta=0.284908,
    ),
    "refitted": Chinchilla(E=1.8172, A=482.01, B=2085.43, alpha=0.3478, beta=0.3658),
}


@dataclasses.dataclass(frozen=True)
class Kaplan:
    """L = ((N_c / N)^(alpha_N / alpha_D) + D_c / D)^alpha_D, N without the embedding.

    Source: Kaplan et al., 2020, equation 1.5.
    """

    critical_parameters: float
    critical_tokens: float
    alpha_parameters: float
    alpha_tokens: float

    def loss(self, num_parameters: float, tokens: float) -> float:
        ratio = self.alpha_parameters / self.alpha_tokens
        by_size = (self.critical_parameters / num_parameters) ** ratio
        return float((by_size + self.critical_tokens / tokens) ** self.alpha_tokens)

    def optimum(self, flops: float) -> Optimum:
        """The parameters and tokens with the lowest loss for a training budget.

        With x = (N_c / N)^r and y = D_c / D, N D fixed, r x = y where the loss is lowest.
        """
        ratio = self.alpha_parameters / self.alpha_tokens
        budget = flops / FLOPS_PER_PARAMETER_AND_TOKEN
        scaled = ratio * budget * self.critical_parameters**ratio / self.critical_tokens
        num_parameters = scaled ** (1 / (1 + ratio))
        tokens = budget / num_parameters
        return Optimum(num_parameters, tokens, self.loss(num_parameters, tokens))


# Kaplan et al., table 2.
KAPLAN = Kaplan(6.4e13, 1.8e13, alpha_parameters=0.076, alpha_tokens=0.103)


def critical_batch(loss_nats: float) -> float:
    """Tokens a batch beyond which more of them save ever fewer steps; it grows as the loss falls.

    Source: Kaplan et al., 2020, equation 1.4 and table 2.
    """
    return float(2e8 / loss_nats ** (1 / 0.21))
