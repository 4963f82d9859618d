"""Settings of the optimizers, a class each."""

from __future__ import annotations

from typing import Annotated, Literal

import pydantic

from palm_jax.config.fields import Fraction, NotNegative, PositiveFloat, PositiveInt, Section

# Parameters that weight decay leaves alone. The paper mentions none.
Undecayed = tuple[Literal["norms", "embeddings", "biases"], ...]


class Adafactor(Section):
    """PaLM's optimizer (PaLM, section 5): Adafactor without factoring."""

    name: Literal["adafactor"] = "adafactor"
    beta1: Fraction = 0.9
    beta2_exponent: PositiveFloat = 0.8  # beta2 = 1 - k^-0.8
    clip_norm: PositiveFloat | None = 1.0  # global norm of the gradient
    update_clip: PositiveFloat | None = 1.0  # RMS of each update; the paper does not mention it
    weight_decay_exponent: PositiveFloat | None = 2.0  # decay = rate^2, not multiplied by rate
    epsilon_square: PositiveFloat = 1e-30  # added to g^2; the paper gives none, T5X this
    epsilon_scale: PositiveFloat = 1e-3  # floor of RMS(parameter); likewise
    factored: bool = False  # second moments of rows and columns alone (Adafactor, section 3)
    no_decay: Undecayed = ()


class AdamW(Section):
    """AdamW (Loshchilov and Hutter, 2019)."""

    name: Literal["adamw"]
    beta1: Fraction = 0.9
    beta2: Fraction = 0.95
    epsilon: PositiveFloat = 1e-8
    clip_norm: PositiveFloat | None = 1.0
    weight_decay: NotNegative = 0.1  # multiplied by the rate
    # Multiply it by rate / peak instead (Wortsman et al., 2023, section 3.2.2).
    independent_decay: bool = False
    no_decay: Undecayed = ()


class Lion(Section):
    """Signs of an interpolated momentum (Chen et al., 2023, algorithm 2)."""

    name: Literal["lion"]
    beta1: Fraction = 0.9  # of what the sign is taken of
    beta2: Fraction = 0.99  # of the momentum that is kept
    clip_norm: PositiveFloat | None = 1.0
    weight_decay: NotNegative = 1e-3  # multiplied by the rate
    no_decay: Undecayed = ()


class Muon(Section):
    """Orthogonalised momentum of the layers' kernels; AdamW for all else (Jordan et al., 2024)."""

    name: Literal["muon"]
    momentum: Fraction = 0.95
    nesterov: bool = True
    newton_schulz_steps: Annotated[int, pydantic.Field(gt=0, le=20)] = 5
    # RMS of a kernel's update over the rate (Liu et al., 2025, section 2.2: 0.2, as AdamW's is).
    # Null: singular values near sqrt(max(1, outputs / inputs)), as in Jordan's code.
    consistent_rms: PositiveFloat | None = None
    # Of all that is no kernel of a layer, by AdamW.
    adamw_rate: PositiveFloat = 1.0  # multiplies the rate
    beta1: Fraction = 0.9
    beta2: Fraction = 0.95
    epsilon: PositiveFloat = 1e-8
    clip_norm: PositiveFloat | None = 1.0
    weight_decay: NotNegative = 0.0  # multiplied by the rate
    no_decay: Undecayed = ()


class SOAP(Section):
    """Adam in Shampoo's eigenbasis for the layers' kernels, else AdamW (Vyas et al., 2024)."""

    name: Literal["soap"]
    beta1: Fraction = 0.95
    beta2: Fraction = 0.95
    shampoo_beta: Fraction | None = None  # of the averages of G G^T and G^T G; null: beta2
    refresh_every: Annotated[int, pydantic.Field(gt=0)] = 10  # updates, of the eigenbasis
    largest_side: Annotated[int, pydantic.Field(gt=0)] = 10_000  # of a kernel, to have one
    epsilon: PositiveFloat = 1e-8
    clip_norm: PositiveFloat | None = 1.0
    weight_decay: NotNegative = 0.01  # multiplied by the rate
    no_decay: Undecayed = ()


class SGD(Section):
    """Gradient descent with momentum (Sutskever et al., 2013)."""

    name: Literal["sgd"]
    momentum: Fraction = 0.9
    nesterov: bool = False
    clip_norm: PositiveFloat | None = 1.0
    weight_decay: NotNegative = 0.0  # multiplied by the rate, and not kept in the momentum
    no_decay: Undecayed = ()


class Sophia(Section):
    """Momentum over an estimate of curvature, clipped (Liu et al., 2023, algorithm 3)."""

    name: Literal["sophia"]
    estimator: Literal["gauss_newton_bartlett", "hutchinson"] = "gauss_newton_bartlett"
    refresh_every: PositiveInt = 10  # updates from one estimate to the next
    beta1: Fraction = 0.965  # of the momentum
    beta2: Fraction = 0.99  # of the curvature, from one estimate to the next
    gamma: PositiveFloat = 0.01  # multiplies the curvature: the larger, the fewer are clipped
    epsilon: PositiveFloat = 1e-12  # floor of gamma x curvature
    clip_norm: PositiveFloat | None = 1.0
    weight_decay: NotNegative = 0.1  # multiplied by the rate
    no_decay: Undecayed = ()


Optimizer = Adafactor | AdamW | Lion | Muon | SOAP | SGD | Sophia
