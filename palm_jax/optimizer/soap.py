"""SOAP: Adam in the eigenbasis of Shampoo's preconditioner for the layers' kernels, AdamW for all
else.

N layers   I inputs   O outputs of a kernel   E elements of a square matrix, row by row

L [I, I] is the average of G G^T, R [O, O] that of G^T G, of a kernel's gradients G [I, O]. The
columns of Q_L and Q_R are their eigenvectors, those of the largest eigenvalues first. An update is

  M <- beta1 M + (1 - beta1) G                    in the kernel's own axes
  V <- beta2 V + (1 - beta2) (Q_L^T G Q_R)^2      in the eigenbasis
  update = Q_L (debiased Q_L^T M Q_R / (sqrt(V) + epsilon)) Q_R^T
  L <- beta L + (1 - beta) G G^T
  R <- beta R + (1 - beta) G^T G

and then, once in `refresh_every`, Q_L (and so Q_R, of R) becomes the orthogonal factor of L Q_L by
a QR decomposition, its columns and the rows of V in the order of diag(Q_L^T L Q_L).

The first update sets L, R and, by eigendecompositions, Q_L and Q_R, and nothing else: no parameter,
of a kernel or not, moves or decays, so that no gradient is seen in a basis that is made of it. Adam
counts from the second. A side longer than `largest_side` keeps the identity.

Source: Vyas et al., 2024 (SOAP), algorithm 3, with M where it has it, and its authors' code
(github.com/nikhilvyas/SOAP), whose first update and debiasing these are: epsilon is added to the
root of a V that is not debiased. There M lies in the eigenbasis and turns along with it, which is
the same M. There a parameter decays after its update; here, as AdamW's, before.
"""

from __future__ import annotations

import collections.abc
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from palm_jax import config
from palm_jax.optimizer import adam, kinds, parts
from palm_jax.optimizer.parts import Arrays, Matrices, average
from palm_jax.reductions import fold
from palm_jax.rounding import rounded

SIDES = ("left", "right")  # of a kernel: its inputs and its outputs
BASES = ("left_basis", "right_basis")


class Moments(NamedTuple):
    """Squares are named for their kernels: that of w_gate_DF is w_gate_E, f32[N, I x I].

    Each device of `fsdp` has a part of E, of all layers; devices along `data` and `tensor` have
    the same.
    """

    count: Any  # i32[]: updates so far, the first among them
    mu: Any  # averages of the gradients, as the parameters
    nu: Any  # of all but the layers' kernels: averages of the gradients' squares
    eigen_nu: Any  # of the layers' kernels: V, shaped as they are
    left: Any  # L
    right: Any  # R
    left_basis: Any  # Q_L
    right_basis: Any  # Q_R


def _is_other(path: kinds.Path) -> bool:
    return not kinds.is_layer_kernel(path)


def _kernels(tree: Any) -> Arrays:
    """The layers' kernels by name."""
    return kinds.chosen(tree, kinds.is_layer_kernel)["layers"]


def _axes(name: str) -> str:
    return "N" + name.rpartition("_")[2]


def _square(name: str) -> str:
    """w_gate_DF -> w_gate_E."""
    return f"{name.rpartition('_')[0]}_E"


def _squares(state: Moments, name: str, fields: collections.abc.Iterable[str]) -> Arrays:
    """Of a kernel, by field of the state; a side that keeps the identity has none."""
    trees = {field: getattr(state, field)["layers"] for field in fields}
    return {field: tree[_square(name)] for field, tree in trees.items() if _square(name) in tree}


def _lengths(name: str, shape: tuple[int, ...]) -> dict[str, int]:
    """I and O of a stacked kernel, by side."""
    inputs = shape[1:2] if _axes(name)[1] == "D" else shape[1:-1]
    num_inputs = math.prod(inputs)
    return {"left": num_inputs, "right": math.prod(shape[1:]) // num_inputs}


# --- one layer's kernel, whole ---


def _times(a: jax.Array, b: jax.Array, zero: jax.Array | int) -> jax.Array:
    """a b in float32, also where matrix units would rather have another format."""
    return rounded(jnp.matmul(a, b, precision="highest"), zero)


def _turned(x: jax.Array, bases: Arrays, zero: jax.Array | int) -> jax.Array:
    """Q_L^T x Q_R."""
    if "left_basis" in bases:
        x = _times(bases["left_basis"].T, x, zero)
    return _times(x, bases["right_basis"], zero) if "right_basis" in bases else x


def _turned_back(x: jax.Array, bases: Arrays, zero: jax.Array | int) -> jax.Array:
    """Q_L x Q_R^T."""
    if "left_basis" in bases:
        x = _times(bases["left_basis"], x, zero)
    return _times(x, bases["right_basis"].T, zero) if "right_basis" in bases else x


def _step(
    mu: jax.Array, nu: jax.Array, number: jax.Array, settings: config.SOAP, zero: jax.Array | int
) -> jax.Array:
    """Adam's, of moments in the eigenbasis.

    Args:
      number: i32[], counted from 1; of an update that is none of Adam's, anything.
    """
    k = jnp.maximum(number, 1).astype(jnp.float32)
    debiasing = jnp.sqrt(1.0 - settings.beta2**k) * (1.0 / (1.0 - settings.beta1**k))
    return rounded(mu / (jnp.sqrt(nu) + settings.epsilon) * debiasing, zero)


def eigenbasis(square: jax.Array) -> jax.Array:
    """Eigenvectors of a symmetric matrix [n, n] as columns, the largest eigenvalue's first."""
    return jax.lax.linalg.eigh(square, symmetrize_input=False)[0][:, ::-1]


def refreshed(
    square: jax.Array, basis: jax.Array, zero: jax.Array | int
) -> tuple[jax.Array, jax.Array]:
    """A step of power iteration from a basis [n, n]: the next, and the order i32[n] of its columns.

    Its column i comes from the column order[i] of `basis`.
    """
    powers = _times(square, basis, zero)
    eigenvalues = fold(rounded(basis * powers, zero))
    order = jnp.argsort(-eigenvalues, stable=True)
    return jax.lax.linalg.qr(powers[:, order], full_matrices=False)[0], order


# --- all parameters ---


def scale_by_soap(
    settings: config.SOAP, matrices: Matrices
) -> optax.GradientTransformationExtraArgs:
    """Decay among it, because the first update has none."""
    shampoo_beta = settings.beta2 if settings.shampoo_beta is None else settings.shampoo_beta
    adamw = adam.scale_by_adam(settings.beta1, settings.beta2, settings.epsilon)
    decay = parts.add_decay(lambda rate, share: settings.weight_decay, settings.no_decay)

    def init(params: Any) -> Moments:
        def squares(side: str, diagonal: float) -> Any:
            found = {}
            for name, x in _kernels(params).items():
                length = _lengths(name, x.shape)[side]
                if length <= settings.largest_side:
                    rows = (diagonal * jnp.eye(length, dtype=x.dtype)).reshape(-1)
                    found[_square(name)] = jnp.broadcast_to(rows, (x.shape[0], rows.size))
            return {"layers": found}

        zeros = jax.tree.map(jnp.zeros_like, params)
        return Moments(
            count=jnp.zeros((), jnp.int32),
            mu=zeros,
            nu=kinds.chosen(zeros, _is_other),
            eigen_nu=kinds.chosen(zeros, kinds.is_layer_kernel),
            left=squares("left", 0.0),
            right=squares("right", 0.0),
            # The identity, in which a fresh state whose count is set to another's is Adam's.
            left_basis=squares("left", 1.0),
            right_basis=squares("right", 1.0),
        )

    def stepped(
        name: str, gradient: jax.Array, mu: jax.Array, state: Moments, zero: jax.Array | int
    ) -> tuple[Arrays, Arrays]:
        """A kernel's update and V; G G^T and G^T G, by side."""

        def of_layer(kernels: Arrays, bases: Arrays) -> tuple[Arrays, Arrays]:
            g = kernels["gradient"]
            turned = _turned(g, bases, zero)
            nu = average(kernels["nu"], turned * turned, settings.beta2, zero)
            step = _step(_turned(kernels["mu"], bases, zero), nu, state.count, settings, zero)
            products = {}
            if "left_basis" in bases:
                products["left"] = _times(g, g.T, zero)
            if "right_basis" in bases:
                products["right"] = _times(g.T, g, zero)
            return {"update": _turned_back(step, bases, zero), "nu": nu}, products

        kernels = {"gradient": gradient, "mu": mu, "nu": state.eigen_nu["layers"][name]}
        bases = _squares(state, name, BASES)
        return matrices.of_layers(of_layer, _axes(name), kernels, bases)

    def with_bases(state: Moments, is_first: jax.Array, zero: jax.Array | int) -> Moments:
        """With the bases of the next update, and V in them; `state.count` has this one in it."""

        def built(kernels: Arrays, squares: Arrays) -> tuple[Arrays, Arrays]:
            return kernels, {
                f"{side}_basis": eigenbasis(squares[side]) for side in SIDES if side in squares
            }

        def continued(kernels: Arrays, squares: Arrays) -> tuple[Arrays, Arrays]:
            nu, bases = kernels["nu"], {}
            for axis, side in enumerate(SIDES):
                if side in squares:
                    name = f"{side}_basis"
                    bases[name], order = refreshed(squares[side], squares[name], zero)
                    nu = jnp.take(nu, order, axis=axis)
            return {"nu": nu}, bases

        def of_all(of_layer: Any) -> tuple[Any, Any, Any]:
            nus: Arrays = {}
            left: Arrays = {}
            right: Arrays = {}
            for name, nu in state.eigen_nu["layers"].items():
                squares = _squares(state, name, (*SIDES, *BASES))
                results, found = matrices.of_layers(of_layer, _axes(name), {"nu": nu}, squares)
                nus[name] = results["nu"]
                for bases, field in zip((left, right), BASES, strict=True):
                    if field in found:
                        bases[_square(name)] = found[field]
            return {"layers": nus}, {"layers": left}, {"layers": right}

        # All devices have one count, and so take one branch: what they exchange in it meets.
        is_due = (state.count - 1) % settings.refresh_every == 0
        nu, left, right = jax.lax.switch(
            jnp.where(is_first, 1, jnp.where(is_due, 2, 0)),
            [
                lambda: (state.eigen_nu, state.left_basis, state.right_basis),
                lambda: of_all(built),
                lambda: of_all(continued),
            ],
        )
        return state._replace(eigen_nu=nu, left_basis=left, right_basis=right)

    def update(
        updates: Any, state: Moments, params: Any = None, zero: jax.Array | int = 0, **extra: Any
    ) -> tuple[Any, Moments]:
        is_first = state.count == 0

        def unless_first(new: Any, old: Any) -> Any:
            return jax.tree.map(lambda n, o: jnp.where(is_first, o, n), new, old)

        adams = optax.ScaleByAdamState(
            count=jnp.maximum(state.count, 1) - 1,
            mu=kinds.chosen(state.mu, _is_other),
            nu=state.nu,
        )
        others, adams = adamw.update(kinds.chosen(updates, _is_other), adams, params, zero=zero)
        moved: Arrays = {}
        mus: Arrays = {}
        nus: Arrays = {}
        averages: dict[str, Arrays] = {side: {} for side in SIDES}
        for name, gradient in _kernels(updates).items():
            old = state.mu["layers"][name]
            mus[name] = average(old, gradient, settings.beta1, zero)
            results, products = stepped(name, gradient, mus[name], state, zero)
            moved[name], nus[name] = results["update"], results["nu"]
            for side, product in products.items():
                old = getattr(state, side)["layers"][_square(name)]
                averages[side][_square(name)] = average(old, product, shampoo_beta, zero)
        after = Moments(
            count=state.count + 1,
            mu=unless_first(kinds.joined({"layers": mus}, adams.mu), state.mu),
            nu=unless_first(adams.nu, state.nu),
            eigen_nu=unless_first({"layers": nus}, state.eigen_nu),
            left={"layers": averages["left"]},
            right={"layers": averages["right"]},
            left_basis=state.left_basis,
            right_basis=state.right_basis,
        )
        steps, _ = decay.update(
            kinds.joined({"layers": moved}, others), optax.EmptyState(), params, zero=zero, **extra
        )
        steps = jax.tree.map(lambda u: jnp.where(is_first, 0.0, u), steps)
        return steps, with_bases(after, is_first, zero)

    return optax.GradientTransformationExtraArgs(init, update)


def chain(settings: config.SOAP, matrices: Matrices) -> dict[str, Any]:
    return {
        "moments": scale_by_soap(settings, matrices),
        "rate": parts.scale_by_rounded_rate(),
        "descent": optax.scale(-1.0),
    }


def normalised(
    settings: config.SOAP, state_after: Any, matrices: Matrices, zero: jax.Array | int
) -> Any:
    """Adam's step of all parameters, that of the layers' kernels in their next update's eigenbasis.

    Which is this one's, unless it was due for refreshing. Zeros after the first update.
    """
    state = state_after["moments"]
    number = state.count - 1

    def of_layer(kernels: Arrays, bases: Arrays) -> tuple[Arrays, Arrays]:
        mu = _turned(kernels["mu"], bases, zero)
        return {"step": _step(mu, kernels["nu"], number, settings, zero)}, {}

    steps: Arrays = {}
    for name, nu in state.eigen_nu["layers"].items():
        kernels = {"mu": state.mu["layers"][name], "nu": nu}
        bases = _squares(state, name, BASES)
        steps[name] = matrices.of_layers(of_layer, _axes(name), kernels, bases)[0]["step"]
    adams = optax.ScaleByAdamState(
        count=jnp.maximum(number, 1), mu=kinds.chosen(state.mu, _is_other), nu=state.nu
    )
    others = adam.adam_step(adams, settings.beta1, settings.beta2, settings.epsilon)
    return kinds.joined({"layers": steps}, others)


def decay_in_force(settings: config.SOAP, state: Any, rate: jax.Array) -> jax.Array:
    """What a parameter loses of itself, f32[]; nothing by the first update."""
    return jnp.where(state["moments"].count == 0, 0.0, rate * settings.weight_decay)
