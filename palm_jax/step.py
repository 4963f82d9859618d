"""The train state and the pure step.

  step(state, batch, controls) -> (state, vitals)

The step is a function: all that can change its result is in its arguments. Letters as in
model.py; how sums keep their bits on any number of devices is in reductions.py.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import functools
import hashlib
import math
import time
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

from palm_jax import (
    attention,
    config,
    curvature,
    data,
    loss,
    model,
    modules,
    optimizer,
    precision,
    reductions,
    rounding,
    schedules,
    sharding,
    vitals,
)
from palm_jax.decoder import dropout
from palm_jax.decoder.split import UNDIVIDED, Split
from palm_jax.precision import float8
from palm_jax.precision import loss_scale as loss_scaling

Vitals = vitals.Vitals


@flax.struct.dataclass
class TrainState:
    """Everything a step changes. The optimizer state has its own count, which gives beta2."""

    step: jax.Array  # i32[]: index of the next data batch; a skipped update advances it
    schedule_step: jax.Array  # i32[]: updates applied so far, as the rate counts them
    params: model.Params
    optimizer: Any
    loss_scale: loss_scaling.LossScale | None = None  # None: the policy has none
    float8: float8.Scalings | None = None  # likewise


class Controls(NamedTuple):
    """The few numbers that may change a step from outside; recorded with every step."""

    rate_scale: jax.Array  # f32[]: multiplies the rate
    skip_above: jax.Array  # f32[]: a gradient norm not below it skips the update


def controls(rate_scale: float = 1.0, skip_above: float = np.inf) -> Controls:
    """Controls as device arrays. By default only a non-finite gradient skips its update."""
    return Controls(jnp.float32(rate_scale), jnp.float32(skip_above))


def gathered(
    params: model.Params, probes: model.Params | None, dtype: jnp.dtype, order: reductions.Order
) -> model.Params:
    """Stored slices of top-level parameters, or of one layer's, made whole along D."""
    whole = {}
    for name, shard in params.items():
        dim = name.rpartition("_")[2].find("D")
        compute = precision.parameter_compute_dtype(name, dtype)
        probe = None if probes is None else probes[name]
        whole[name] = reductions.gather(shard, probe, None if dim < 0 else dim, compute, order)
    return whole


@jax.custom_vjp
def _gradients_together(hidden_BLD: jax.Array, table_VD: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Both as they are; their gradients are there before the layers' backward pass begins.

    Otherwise XLA makes the table's gradient last of all, beside the embedding's, and keeps the
    gradient of the logits, a pass's largest array, all that time.
    """
    return hidden_BLD, table_VD


def _together(saved: None, gradients: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    # On TPUs alone: on CPU (jax 0.10.2, bfloat16, eight devices along fsdp) the barrier lets
    # the gradients' buffers be written to before they were read, and losses become NaN.
    return jax.lax.platform_dependent(
        gradients, tpu=jax.lax.optimization_barrier, default=lambda gradients: gradients
    )


_gradients_together.defvjp(lambda hidden, table: ((hidden, table), None), _together)


def split_of(settings: config.Config) -> Split:
    """How the devices along `tensor` share the model; must run where the mesh axes are bound."""
    size = jax.lax.axis_size("tensor")
    order = reductions.order_of(settings.numerics)
    return UNDIVIDED if size == 1 else reductions.OverTensor(size, order)


def outputs(
    params: model.Params, inputs_BL: jax.Array, settings: config.Config, end_of_document: int
) -> tuple[jax.Array, jax.Array]:
    """What a microbatch's logits are made of: hidden states [B, L, D], the table [V here, D].

    Args:
      params: slices as stored; must run where the mesh axes are bound.
    """
    given = params, inputs_BL, settings, end_of_document
    hidden_BLD, table_VD, _ = _outputs(*given, probes=None, scales=None, key=None, observed=False)
    return hidden_BLD, table_VD


def _outputs(
    params: model.Params,
    inputs_BL: jax.Array,
    settings: config.Config,
    end_of_document: int,
    probes: model.Params | None,
    scales: float8.LayerScales | None,
    key: jax.Array | None,
    observed: bool,
) -> tuple[jax.Array, jax.Array, model.Seen | None]:
    """As `outputs`, with what the layers show if `observed`; arguments as of `_microbatch`."""
    dtype = precision.compute_dtype(settings.precision)
    order = reductions.order_of(settings.numerics)
    split = split_of(settings)
    documents_BL = (
        attention.document_numbers(inputs_BL, end_of_document)
        if settings.model.isolate_documents
        else None
    )
    top = {name: leaf for name, leaf in params.items() if name != "layers"}
    whole = gathered(top, probes, dtype, order)
    whole["layers"] = params["layers"], None if probes is None else probes["layers"], scales
    found: Any = (model.observed_hidden if observed else model.hidden)(
        whole,
        inputs_BL,
        settings=settings.model,
        dtype=dtype,
        documents_BL=documents_BL,
        gather_layer=lambda stored: gathered(stored[0], stored[1], dtype, order),
        layer_product=lambda stored: (
            None if stored[2] is None else float8.product(stored[2], settings.precision, dtype)
        ),
        split=split,
        key=key,
    )
    hidden_BLd, layers = found if observed else (found, None)
    hidden_BLD, table_VD = _gradients_together(split.whole(hidden_BLd), model.unembedding(whole))
    return hidden_BLD, table_VD, layers


def microbatch_losses(
    params: model.Params,
    tokens_BL: jax.Array,
    weights_B: jax.Array | None,
    settings: config.Config,
    end_of_document: int,
    probes: model.Params | None = None,
    scales: float8.LayerScales | None = None,
) -> loss.LossSums:
    """LossSums of each of a microbatch's sequences [B], from this device's slices.

    Args:
      params: slices as stored; must run where the mesh axes are bound.
      tokens_BL: i32[B, L+1]; position t predicts token t + 1 of its own row.
      weights_B: bool; false for rows that only pad a microbatch.
      probes: as from reductions.probes_for, where gradients are to be digested.
      scales: of the products in float8, stacked over layers; None: all are in the compute
        format.
    """
    given = params, tokens_BL, weights_B, settings, end_of_document, probes, scales
    return _microbatch(*given, key=None, observed=False)[0]


def _microbatch(
    params: model.Params,
    tokens_BL: jax.Array,
    weights_B: jax.Array | None,
    settings: config.Config,
    end_of_document: int,
    probes: model.Params | None,
    scales: float8.LayerScales | None,
    key: jax.Array | None,
    observed: bool,
    labels_key: jax.Array | None = None,
) -> tuple[loss.LossSums, vitals.Seen | None]:
    """As `microbatch_losses`, with what the forward pass shows if it is `observed`.

    Args:
      key: of the dropout; None: nothing is dropped.
      labels_key: of labels that are drawn in the place of the targets; None: none are.
    """
    split = split_of(settings)
    inputs_BL, targets_BL = tokens_BL[:, :-1], tokens_BL[:, 1:]
    hidden_BLD, table_VD, layers = _outputs(
        params, inputs_BL, settings, end_of_document, probes, scales, key, observed
    )
    vocabulary_size, chunk = settings.model.vocabulary_size, settings.numerics.loss_chunk
    logit_scale = settings.model.output_scale
    if labels_key is not None:
        of_logits = hidden_BLD, table_VD, vocabulary_size, split, logit_scale
        targets_BL = curvature.drawn_labels(*of_logits, chunk, labels_key)
    weights_BL = (
        None if weights_B is None else jnp.broadcast_to(weights_B[:, None], targets_BL.shape)
    )
    if chunk is not None:
        if weights_BL is None:
            weights_BL = jnp.ones(targets_BL.shape, jnp.bool_)
        given: tuple[Any, ...] = hidden_BLD, table_VD, targets_BL, weights_BL, vocabulary_size
        of_chunks: Any = loss.chunked_sums_and_peaks if observed else loss.chunked_sums
        sums = of_chunks(*given, split, chunk, logit_scale)
    else:
        logits_BLV = loss.logits(hidden_BLD, table_VD, vocabulary_size, split, logit_scale)
        of_all: Any = loss.sums_and_peaks if observed else loss.sums_by_sequence
        sums = of_all(logits_BLV, targets_BL, weights_BL, split)
    if layers is None:
        return sums, None
    sums, peaks_B = sums
    sum_of_logits = loss.sum_of_logits(hidden_BLD, table_VD, vocabulary_size, split, logit_scale)
    return sums, vitals.of_microbatch(layers, peaks_B, sum_of_logits)


class Summed(NamedTuple):
    """Of a whole batch; neither gradient nor sums are divided by anything yet."""

    gradient: model.Params  # in the layout of the parameters, float32
    sums: loss.LossSums  # scalars
    # u32[microbatches, 2]: digest of each one's own gradient, if log.microbatch_digests.
    microbatch_digests: jax.Array | None
    amaxes: dict[str, jax.Array] | None  # of the products in delayed float8, f32[N, 3]
    seen: vitals.Seen | None  # of the forward pass, if log.vitals is `all`


def gradients(
    params: model.Params,
    tokens: jax.Array,
    settings: config.Config,
    end_of_document: int,
    data_step: jax.Array | None = None,
    scale: jax.Array | None = None,
    scalings: float8.Scalings | None = None,
    *,
    labels_drawn: bool = False,
    direction: model.Params | None = None,
) -> Summed:
    """Gradient of the summed objective, and LossSums of the whole batch.

    Args:
      params: this device's slices, float32.
      tokens: i32[passes, 1, microbatch, L+1], this device's microbatch of each pass.
      data_step: i32[]; with the seed it decides what dropout drops. None: nothing is dropped.
      scale: multiplies the objective where cotangents start; the gradient is still multiplied
        by it when it comes back.
      scalings: the train state's, under delayed float8.
      labels_drawn: take the cross-entropy alone, with labels drawn from the model's softmax.
      direction: a tree like `params`. Given, the objective's Hessian is multiplied by it, and
        that product comes back in the gradient's place.
    """
    order = reductions.order_of(settings.numerics)
    probes = reductions.probes_for(params) if settings.log.microbatch_digests else None
    num_passes, width = tokens.shape[0], jax.lax.axis_size(sharding.DATA_PARALLEL)

    slots = None if scalings is None else float8.slots(scalings)
    observed = settings.log.vitals == "all"

    def objective(
        params: model.Params, probes: Any, slots: Any, tokens_BL: jax.Array, place: jax.Array
    ) -> tuple[jax.Array, tuple[loss.LossSums, vitals.Seen | None]]:
        scales: float8.LayerScales | None = None
        if scalings is not None:
            scales = {name: (scalings[name].scale, slot) for name, slot in slots.items()}
        elif settings.precision.policy == "float8":
            scales = {}
        key = None
        if settings.model.has_dropout and data_step is not None:
            key = dropout.microbatch_key(settings.seed, data_step, place)
        labels_key = None
        if labels_drawn:
            assert data_step is not None
            labels_key = curvature.labels_key(settings.seed, data_step, place)
        given = params, tokens_BL, None, settings, end_of_document, probes, scales, key, observed
        by_sequence, seen = _microbatch(*given, labels_key)
        sums = jax.tree.map(functools.partial(jnp.sum, axis=0), by_sequence)
        z_weight = settings.model.z_loss
        value = sums.cross_entropy if labels_drawn else loss.objective(sums, z_weight)
        return value if scale is None else value * scale, (sums, seen)

    def one_pass(one: tuple[jax.Array, jax.Array]) -> Any:
        tokens, number = one
        backward = jax.grad(objective, argnums=(0, 1, 2), has_aux=True)
        if direction is not None:
            backward = curvature.along(backward, direction)
        # Which of the batch's microbatches this is; it belongs to no mesh.
        place = number * width + jax.lax.axis_index(sharding.DATA_PARALLEL)
        (gradient, words, amaxes), (sums, seen) = backward(params, probes, slots, tokens[0], place)
        digests = None
        if probes is not None:
            none = jnp.zeros((num_passes * width, 2), jnp.uint32)
            digests = none.at[place].set(reductions.probed(words))
        # Beside the gradient, whose sum over devices is in its gathers, sums of numbers.
        beside = sums, digests, None if seen is None else seen.sums
        beside = jax.tree.map(lambda x: order.over(x, sharding.DATA_PARALLEL), beside)
        peaks = None if seen is None else seen.largest
        return gradient, beside, reductions.Largest(amaxes), peaks

    zero = rounding.unknown_zero(tokens.reshape(-1)[0])  # no token's id is negative
    gradient, (sums, digests, seen_sums), amaxes, peaks = order.stream(
        one_pass, (tokens, jnp.arange(num_passes)), zero
    )
    everywhere = (*sharding.DATA_PARALLEL, "tensor")
    return Summed(
        gradient=reductions.complete_over_tensor(gradient, order),
        sums=sums,
        microbatch_digests=digests,
        # A maximum is the same in any order.
        amaxes=jax.tree.map(lambda x: jax.lax.pmax(x, everywhere), amaxes.values),
        seen=None if peaks is None else vitals.complete(vitals.Seen(seen_sums, peaks), order),
    )


def num_sequences(tokens: jax.Array) -> int:
    """Of the whole batch, of which `tokens` [passes, 1, microbatch, L+1] are this device's."""
    passes, _, microbatch, _ = tokens.shape
    return passes * jax.lax.axis_size(sharding.DATA_PARALLEL) * microbatch


def objective_scale(
    state: TrainState, tokens: jax.Array, precision: config.Precision
) -> jax.Array | None:
    """What float16's objective, a sum over targets, is multiplied by: a power of two, f32[].

    It is the loss scale over the number of targets, rounded, so that a loss scale means what
    it does for trainers that differentiate the mean. None: nothing is scaled.
    """
    if precision.policy != "float16":
        return None
    num_targets = num_sequences(tokens) * (tokens.shape[-1] - 1)
    per_target = 2.0 ** -round(math.log2(num_targets))
    scale = jnp.float32(1) if state.loss_scale is None else state.loss_scale.scale
    return scale * per_target


def _logging(settings: config.Config, **changes: Any) -> config.Config:
    return settings.model_copy(update={"log": settings.log.model_copy(update=changes)})


def _curvature(
    state: TrainState,
    params: model.Params,
    tokens: jax.Array,
    settings: config.Config,
    end_of_document: int,
    applied: jax.Array,
    zero: jax.Array | int,
) -> model.Params | None:
    """Estimate of the loss's second derivatives, where the update wants one, and else zeros.

    None: the rule takes none.

    Args:
      params: the state's, float32; `tokens` and others as in `train_step`.
      applied: bool[]; a skipped update wants none.
    """
    rule = settings.optimizer
    due = optimizer.wants_curvature(rule, state.optimizer)
    if due is None or not isinstance(rule, config.Sophia):
        return None
    block = curvature.first_block(tokens, settings.numerics.lanes)
    num_targets = num_sequences(block) * (block.shape[-1] - 1)
    scale = objective_scale(state, block, settings.precision)
    unscaled = 1.0 / num_targets if scale is None else (1.0 / num_targets) * (1.0 / scale)
    quiet = _logging(settings, microbatch_digests=False, vitals="basic")
    given = params, block, quiet, end_of_document, state.step, scale, state.float8

    def estimate(turn: int, nothing: model.Params) -> model.Params:
        return curvature.estimate(
            functools.partial(gradients, *given),
            params,
            rule.estimator,
            seed=settings.seed,
            step=state.step,
            num_targets=num_targets,
            unscaled=unscaled,
            zero=zero,
        )

    # A loop of one turn or none, which all devices decide alike, and which waits for the gradient.
    # Not a conditional: on several CPU devices (jax 0.10.2) its collectives meet others.
    num_turns = (due & applied).astype(jnp.int32)
    return jax.lax.fori_loop(0, num_turns, estimate, jax.tree.map(jnp.zeros_like, params))


def train_step(
    state: TrainState,
    tokens: jax.Array,
    controls: Controls,
    *,
    settings: config.Config,
    end_of_document: int,
) -> tuple[TrainState, Vitals]:
    """One step on this device's slices and microbatches (`compile_step` maps it).

    A skipped update leaves parameters, optimizer state and its counts as they were; only
    the data step advances, and the loss scale hears of an overflow.
    """
    order = reductions.order_of(settings.numerics)
    zero = 0 if settings.numerics.reduction == "fast" else rounding.unknown_zero(state.step)
    matrices = reductions.MatrixReductions(order, zero)
    rule = optimizer.build(settings.optimizer, matrices, 1.0 / settings.model.width_multiple)

    params = precision.wide(state.params)
    scale = objective_scale(state, tokens, settings.precision)
    given = params, tokens, settings, end_of_document, state.step
    summed = gradients(*given, scale, state.float8)
    sums, amaxes = summed.sums, summed.amaxes
    per_target = 1.0 / sums.targets.astype(jnp.float32)
    # Powers of two: multiplied and divided by, they leave the bits of a gradient as they are.
    unscaled = per_target if scale is None else per_target * (1.0 / scale)
    gradient = jax.tree.map(lambda g: g * unscaled, summed.gradient)
    gradient_squares = matrices.sums_of_squares(gradient)
    gradient_norm = reductions.norm_of(gradient_squares)
    rate = schedules.rate(settings.schedule)(state.schedule_step) * controls.rate_scale
    # A step is compiled for each batch size, so that this is a constant.
    factor = schedules.batch_factor(settings.schedule, num_sequences(tokens))
    rate = rate if factor is None else rate * factor
    share = None
    if optimizer.needs_share(settings.optimizer):
        share = schedules.share_of_peak(settings.schedule)(state.schedule_step)
    optimizer_before = precision.wide(state.optimizer)
    # Written so that NaN compares as "skip".
    applied = gradient_norm < controls.skip_above
    updates, optimizer_state = rule.update(
        gradient,
        optimizer_before,
        params,
        gradient_norm=gradient_norm,
        rate=rate,
        share=share,
        curvature=_curvature(state, params, tokens, settings, end_of_document, applied, zero),
        zero=zero,
    )
    after = TrainState(
        step=state.step,
        schedule_step=state.schedule_step + 1,
        params=optax.apply_updates(params, updates),
        optimizer=optimizer_state,
        loss_scale=state.loss_scale,
        float8=None
        if state.float8 is None or amaxes is None
        else float8.after(state.float8, amaxes, settings.precision),
    )
    after = jax.tree.map(
        lambda new, old: jnp.where(applied, new.astype(old.dtype), old), after, state
    )
    squares = vitals.Squares(
        gradient=gradient_squares,
        parameters=matrices.sums_of_squares(params),
        update=matrices.sums_of_squares(updates),
    )
    num_parameters = matrices.num_elements(params)
    cross_entropy = sums.cross_entropy * per_target
    z_loss = settings.model.z_loss * (sums.z * per_target)
    measured = {
        "loss": cross_entropy + z_loss,
        "cross_entropy": cross_entropy,
        "z_loss": z_loss,
        "mean_log_z": sums.log_z * per_target,
        "gradient_norm": gradient_norm,
        "update_rms": reductions.norm_of(squares.update) * num_parameters**-0.5,
        "parameter_norm": reductions.norm_of(squares.parameters),
        "rate": rate,
        "rate_scale": controls.rate_scale,
        "skip_above": controls.skip_above,
        **optimizer.in_force(settings.optimizer, state.optimizer, rate, share),
        "applied": applied,
        "schedule_step": state.schedule_step,
        "targets": sums.targets,
    }
    if summed.seen is not None:
        measured |= vitals.of_step(
            summed.seen,
            squares,
            settings=settings,
            tokens=tokens,
            per_target=per_target,
            params=params,
            raw_gradient=summed.gradient,
            gradient=gradient,
            gradient_norm=gradient_norm,
            optimizer_before=optimizer_before,
            optimizer_after=optimizer_state,
            split=split_of(settings),
            matrices=matrices,
        )
    if summed.microbatch_digests is not None:
        measured["microbatch_digests"] = summed.microbatch_digests
    after = after.replace(step=state.step + 1)  # type: ignore[attr-defined]
    if state.loss_scale is not None:
        # The norm is of the gradient summed over all devices: all of them decide alike.
        finite = jnp.isfinite(gradient_norm)
        next_scale = loss_scaling.after(state.loss_scale, finite, settings.precision)
        after = after.replace(loss_scale=next_scale)  # type: ignore[attr-defined]
        measured["loss_scale"] = state.loss_scale.scale
        measured["skips_at_floor"] = next_scale.skips_at_floor
    return after, measured


# --- compiled for a mesh ------------------------------------------------------------------


class CompiledStep(NamedTuple):
    """The step for one batch size, and what identifies its program."""

    call: collections.abc.Callable[..., tuple[TrainState, Vitals]]
    lowered_digest: str  # of the module handed to XLA; the same in every process
    # Of XLA's own module, places in source files removed. Equal is strong evidence for equal
    # bits; unequal says nothing, because versions print differently.
    optimized_digest: str
    compile_seconds: float  # tracing included


@dataclasses.dataclass(frozen=True)
class Program:
    """The functions of one config on one mesh, compiled when first called."""

    settings: config.Config
    mesh: jax.sharding.Mesh
    state_shapes: TrainState  # ShapeDtypeStruct leaves, with their shardings
    init: collections.abc.Callable[[], TrainState]
    init_params: collections.abc.Callable[[], model.Params]  # of `init`; a third of the memory
    losses: Any  # (params, tokens, weights) -> LossSums [passes, devices, microbatch]
    # (state, batch) -> u32[microbatches, 2]: digest of each microbatch's own gradient.
    microbatch_digests: collections.abc.Callable[[TrainState, jax.Array], jax.Array]
    moved: collections.abc.Callable[[jax.Array], jax.Array]  # a batch, each row one device on
    traceable_step: Any  # jitted; `step` calls what was compiled from it
    compiled: dict[int, CompiledStep] = dataclasses.field(default_factory=dict)  # by batch size

    def is_compiled(self, batch: jax.Array) -> bool:
        """Whether a step of a batch of this size begins at once."""
        return int(np.prod(batch.shape[:3])) in self.compiled

    def step(
        self, state: TrainState, batch: jax.Array, controls: Controls
    ) -> tuple[TrainState, Vitals]:
        """One step, compiled at the first batch of each size. Donates `state`."""
        num_sequences = int(np.prod(batch.shape[:3]))
        if num_sequences not in self.compiled:
            began = time.perf_counter()
            lowered = self.traceable_step.lower(state, batch, controls)
            executable = lowered.compile()
            self.compiled[num_sequences] = CompiledStep(
                call=executable,
                lowered_digest=_digest_of_text(lowered.as_text()),
                optimized_digest=_digest_of_text(modules.without_places(executable.as_text())),
                compile_seconds=time.perf_counter() - began,
            )
        return self.compiled[num_sequences].call(state, batch, controls)

    def adopted(self, state: TrainState) -> TrainState:
        """A state of another precision policy as this program stores it.

        Parameters and moments are rounded or widened; what a policy remembers of earlier steps
        is kept where both have it in one form, and begins anew elsewhere.
        """
        like, precise = self.state_shapes, self.settings.precision

        def remembered(old: Any, wanted: Any, begin: collections.abc.Callable[[], Any]) -> Any:
            forms = [jax.tree.map(lambda x: (x.shape, x.dtype), tree) for tree in (old, wanted)]
            return old if forms[0] == forms[1] else begin()

        state = state.replace(  # type: ignore[attr-defined]
            loss_scale=remembered(
                state.loss_scale, like.loss_scale, lambda: loss_scaling.init(precise)
            ),
            float8=remembered(
                state.float8,
                like.float8,
                lambda: float8.init(precise, self.settings.model),
            ),
        )
        return jax.tree.map(
            lambda x, shape: jax.device_put(x.astype(shape.dtype), shape.sharding), state, like
        )

    def rows_here(self, num_sequences: int) -> np.ndarray:
        """Which rows of a batch this process's devices hold, in the order that `put` takes."""
        mesh, size = self.settings.mesh, self.settings.numerics.microbatch
        slots = sharding.local_slots(self.mesh)
        return data.rows_of(num_sequences, size, mesh.data_parallel, slots)

    def put(self, rows: np.ndarray) -> jax.Array:
        """This process's rows [rows, ...] as [passes, devices, microbatch, ...] on the mesh."""
        width, size = self.settings.mesh.data_parallel, self.settings.numerics.microbatch
        num_slots, rest = len(sharding.local_slots(self.mesh)), rows.shape[1:]
        passes = len(rows) // (num_slots * size)
        return jax.make_array_from_process_local_data(
            sharding.batch_sharding(self.mesh),
            rows.reshape(passes, num_slots, size, *rest),
            (passes, width, size, *rest),
        )


def _digest_of_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def make_program(settings: config.Config, mesh: jax.sharding.Mesh, end_of_document: int) -> Program:
    """Prepare (without compiling) what a run calls.

    Args:
      end_of_document: the corpus's id for it; used where documents are isolated.
    Raises:
      WrongInput, CannotDo: as attention.check.
    """
    attention.check(
        settings.model.attention,
        mesh.devices.flat[0].platform,
        settings.model.sequence_length,
        settings.model.head_size,
    )
    # Its `init` asks nothing of whole matrices.
    whole = optimizer.build(settings.optimizer, matrices=None)  # type: ignore[arg-type]

    def fresh(zero: jax.Array) -> TrainState:
        dtype = precision.stored_dtype(settings.precision)
        params = precision.stored(
            model.init(jax.random.key(settings.seed), settings.model, zero), dtype
        )
        return TrainState(
            step=jnp.int32(0),
            schedule_step=jnp.int32(0),
            params=params,
            optimizer=whole.init(params),
            loss_scale=loss_scaling.init(settings.precision),
            float8=float8.init(settings.precision, settings.model),
        )

    shapes = jax.eval_shape(fresh, np.int32(0))
    shards = sharding.shardings(mesh, shapes)
    shapes = jax.tree.map(
        lambda s, place: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=place), shapes, shards
    )
    layout = jax.tree_util.tree_map_with_path(sharding.partition_spec, shapes)
    batch = PartitionSpec(None, sharding.DATA_PARALLEL)
    on_mesh = functools.partial(jax.shard_map, mesh=mesh, check_vma=False)
    step = on_mesh(
        functools.partial(train_step, settings=settings, end_of_document=end_of_document),
        in_specs=(layout, batch, PartitionSpec()),
        out_specs=(layout, PartitionSpec()),
    )

    platform = mesh.devices.flat[0].platform
    options = precision.compiler_options(platform, settings.numerics.reduction)
    # Random bits are much code that runs once: half the time to compile, the same bits.
    once = {"xla_backend_optimization_level": 1} if platform == "cpu" else {}

    def losses(params: model.Params, tokens: jax.Array, weights: jax.Array) -> loss.LossSums:
        def one_pass(rows: tuple[jax.Array, jax.Array]) -> loss.LossSums:
            sums = microbatch_losses(params, rows[0][0], rows[1][0], settings, end_of_document)
            # Whole on every device, so that every process can read it.
            return jax.tree.map(
                lambda x: jax.lax.all_gather(x, sharding.DATA_PARALLEL, axis=0), sums
            )

        return jax.lax.map(one_pass, (tokens, weights))

    digesting = _logging(settings, microbatch_digests=True, vitals="basic")

    def microbatch_digests(state: TrainState, tokens: jax.Array) -> jax.Array:
        params = precision.wide(state.params)
        scale = objective_scale(state, tokens, settings.precision)
        given = params, tokens, digesting, end_of_document, state.step
        summed = gradients(*given, scale, state.float8)
        assert summed.microbatch_digests is not None
        return summed.microbatch_digests

    return Program(
        settings=settings,
        mesh=mesh,
        state_shapes=shapes,
        # An argument, because the compiler must not know that it is 0.
        init=functools.partial(
            jax.jit(fresh, out_shardings=shards, compiler_options=once), np.int32(0)
        ),
        init_params=functools.partial(
            jax.jit(
                lambda zero: fresh(zero).params, out_shardings=shards.params, compiler_options=once
            ),
            np.int32(0),
        ),
        traceable_step=jax.jit(
            step, donate_argnums=0, out_shardings=(shards, None), compiler_options=options
        ),
        microbatch_digests=jax.jit(
            on_mesh(microbatch_digests, in_specs=(layout, batch), out_specs=PartitionSpec()),
            compiler_options=options,
        ),
        moved=jax.jit(
            lambda tokens: jnp.roll(tokens, 1, axis=1),
            out_shardings=sharding.batch_sharding(mesh),
        ),
        losses=jax.jit(
            on_mesh(losses, in_specs=(layout.params, batch, batch), out_specs=PartitionSpec()),
            compiler_options=options,
        ),
    )
