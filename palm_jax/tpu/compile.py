"""The train step compiled for TPUs that are not there, and what the compiler says of it.

  topology = topologies.parse("v4:12x16x16", num_slices=2)
  stages = [answer(settings, topology, size) for size in batch_sizes(settings)]

The program is the one that `train` runs, lowered for a topology's devices and for the shapes
of its own state: nothing is allocated. A step that the compiler refuses is an answer too.

topologies.environment() must be set before this module, which imports JAX, is imported.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import itertools
import math
import re
import time
from typing import Any

import jax
import jax.numpy as jnp

from palm_jax import attention, config, modules, sharding, step
from palm_jax.errors import CannotDo, WrongInput
from palm_jax.plan import flops
from palm_jax.tpu import meshes, topologies

# Products of matrices that the splash kernels execute for each pair of blocks.
FORWARD_PRODUCTS = 2  # scores; their weights times values
# One kernel for keys and values (scores again, and gradients of weights, values, keys), and
# one for queries (scores and weights' gradient again, and queries' gradient).
BACKWARD_PRODUCTS = 4 + 3
RECOMPUTING = ("full", "dots")  # kinds of model.remat that execute the forward kernel twice

SWEEP_LIMIT = 12  # programs that a sweep compiles


@dataclasses.dataclass(frozen=True)
class Transfer:
    """Collectives of one kind over the same mesh axes, added up: by one chip in one step."""

    kind: str  # of modules.COLLECTIVES
    axes: tuple[str, ...]  # mesh axes whose coordinates vary within a group
    crosses_slices: bool
    count: int
    operand_bytes: int
    sent_bytes: int  # as modules.Collective counts them


@dataclasses.dataclass(frozen=True)
class Refusal:
    """Why the compiler gave no program."""

    reason: str  # its first line
    needed_bytes: int | None = None  # arguments and all; None where memory was not the reason
    limit_bytes: int | None = None


@dataclasses.dataclass(frozen=True)
class Answer:
    """What the compiler makes of one step, per chip. None stands where it gave no program.

    `estimated_step_s` is the compiler's own estimate in cycles, at the clock at which the matrix
    units reach the chip's peak, plus `attention_kernel_cycles`, which the estimate lacks. It is
    no measurement. It leaves out communication, and is a sum in which nothing overlaps.
    """

    batch_size: int  # sequences
    reduction: str  # numerics.reduction
    mesh: dict[str, int]
    chips: int
    libtpu: str
    fits: bool
    reason: str | None  # the compiler's, where it does not
    compile_s: float  # tracing left out; until the refusal, if it came to that
    hbm_argument_bytes: int  # of a refused program without what tiles add
    hbm_temp_bytes: int | None
    hbm_alias_bytes: int | None  # of the results, written where arguments were
    # The compiler's own figure; with reuse it can lie below arguments and temporaries together.
    # Of a refused program what it would need, if that was the reason.
    hbm_peak_bytes: int | None
    hbm_limit_bytes: int
    flops_per_step: float  # what the model needs, all chips together
    flops_per_chip: float
    estimated_cycles: int | None
    attention_kernel_cycles: int  # see `splash_flops`; 0 without these kernels
    estimated_step_s: float | None
    estimated_mfu: float | None
    collectives: tuple[Transfer, ...]
    crosses_slices_bytes: int | None  # sent by one chip to other slices in one step

    @property
    def out_of_memory(self) -> bool:
        return not self.fits and self.hbm_peak_bytes is not None


def batch_sizes(settings: config.Config) -> list[int]:
    """Sequences a step of every stage of the ramp, each once: each is a program."""
    return list(dict.fromkeys(settings.data.ramp.sizes))


def answer(settings: config.Config, topology: topologies.Topology, batch_size: int) -> Answer:
    """Compile the train step for one batch size and read what came of it.

    Raises:
      WrongInput: the mesh does not have the topology's chips, or not its slices; or as
        attention.check says.
      CannotDo: libtpu is missing or does not know the topology, or JAX finds no such mesh.
    """
    mesh = meshes.physical_mesh(topology.devices(), _mesh_shape(settings))
    program = step.make_program(settings, mesh, end_of_document=0)  # which id is no matter
    arguments = (program.state_shapes, *_batch_and_controls(settings, mesh, batch_size))
    lowered = program.traceable_step.lower(*arguments)
    began = time.perf_counter()
    try:
        executable = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        given_up = refusal(str(error))
        return described(
            settings,
            topology,
            batch_size,
            given_up,
            compile_s=time.perf_counter() - began,
            argument_bytes=_bytes_here(arguments),
        )
    return described(
        settings,
        topology,
        batch_size,
        modules.read(executable.as_text()),
        compile_s=time.perf_counter() - began,
        memory=executable.memory_analysis(),
    )


def check_mesh(settings: config.Config, topology: topologies.Topology) -> None:
    """Raise WrongInput if the config's mesh does not have as many devices as there are chips."""
    shape = _mesh_shape(settings)
    if (size := math.prod(shape.values())) != topology.num_chips:
        slices = f"{topology.num_slices} slices of " if topology.num_slices > 1 else ""
        raise WrongInput(
            f"mesh.data x mesh.fsdp x mesh.tensor = {' x '.join(map(str, shape.values()))} = "
            f"{size}, but {slices}{topology.name} have {topology.num_chips} chips; make them equal"
        )


def _mesh_shape(settings: config.Config) -> dict[str, int]:
    mesh = settings.mesh
    return {"data": mesh.data, "fsdp": mesh.fsdp, "tensor": mesh.tensor}


def _batch_and_controls(
    settings: config.Config, mesh: jax.sharding.Mesh, batch_size: int
) -> tuple[jax.ShapeDtypeStruct, step.Controls]:
    width, size = settings.mesh.data_parallel, settings.numerics.microbatch
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    tokens = jax.ShapeDtypeStruct(
        (batch_size // (width * size), width, size, settings.model.sequence_length + 1),
        jnp.int32,
        sharding=sharding.batch_sharding(mesh),
    )
    number: Any = jax.ShapeDtypeStruct((), jnp.float32, sharding=whole)
    return tokens, step.Controls(number, number)


def _bytes_here(shapes: Any) -> int:
    """Bytes that each device holds of arrays with these shapes and shardings."""
    return sum(
        math.prod(s.sharding.shard_shape(s.shape)) * s.dtype.itemsize
        for s in jax.tree.leaves(shapes)
    )


def described(
    settings: config.Config,
    topology: topologies.Topology,
    batch_size: int,
    outcome: modules.Module | Refusal,
    *,
    compile_s: float,
    memory: Any = None,
    argument_bytes: int = 0,
) -> Answer:
    """The answer that an outcome of compiling is.

    Args:
      memory: with a module, what `memory_analysis()` of its executable says.
      argument_bytes: with a refusal, bytes of the step's arguments on one chip.
    """
    chip, num_chips = topology.chip, topology.num_chips
    model_flops = flops.train_flops_per_token(settings.model) * batch_size
    model_flops *= settings.model.sequence_length
    kernel_cycles = math.ceil(splash_flops(settings, batch_size) / chip.flops_per_cycle)
    fields: dict[str, Any] = {
        "batch_size": batch_size,
        "reduction": settings.numerics.reduction,
        "mesh": _mesh_shape(settings),
        "chips": num_chips,
        "libtpu": topologies.libtpu_version(),
        "compile_s": compile_s,
        "flops_per_step": model_flops,
        "flops_per_chip": model_flops / num_chips,
        "attention_kernel_cycles": kernel_cycles,
    }
    if isinstance(outcome, Refusal):
        return Answer(
            **fields,
            fits=False,
            reason=outcome.reason,
            hbm_argument_bytes=argument_bytes,
            hbm_temp_bytes=None,
            hbm_alias_bytes=None,
            hbm_peak_bytes=outcome.needed_bytes,
            hbm_limit_bytes=outcome.limit_bytes or chip.hbm,
            estimated_cycles=None,
            estimated_step_s=None,
            estimated_mfu=None,
            collectives=(),
            crosses_slices_bytes=None,
        )
    cycles = outcome.estimated_cycles()
    seconds = None if cycles is None else (cycles + kernel_cycles) / chip.clock
    collectives = transfers(outcome, _mesh_shape(settings), topology.num_slices)
    return Answer(
        **fields,
        fits=True,  # what does not fit, the compiler refuses
        reason=None,
        hbm_argument_bytes=memory.argument_size_in_bytes,
        hbm_temp_bytes=memory.temp_size_in_bytes,
        hbm_alias_bytes=memory.alias_size_in_bytes,
        hbm_peak_bytes=memory.peak_memory_in_bytes,
        hbm_limit_bytes=chip.hbm,
        estimated_cycles=cycles,
        estimated_step_s=seconds,
        estimated_mfu=seconds and model_flops / num_chips / (seconds * chip.peak_flops),
        collectives=collectives,
        crosses_slices_bytes=sum(t.sent_bytes for t in collectives if t.crosses_slices),
    )


def splash_flops(settings: config.Config, batch_size: int) -> float:
    """FLOPs of matrix products in the splash kernels, on one chip in one step; 0 without them.

    Of the n x n blocks of scores of a head, n = T / b, the kernels go through the n (n + 1) / 2
    that the causal mask does not hide entirely, and one product costs 2 b^2 K in each:

      N (B / w) (H / t) x n (n + 1) / 2 x 2 b^2 K x products

    for N layers, B sequences over w data-parallel devices, and H heads over t. Products are 2
    forward, 2 more where rematerialization executes the forward kernel again, and 7 backward.
    """
    model, mesh = settings.model, settings.mesh
    if model.attention != "splash":
        return 0.0
    size = attention.block_size(model.sequence_length)
    num_blocks = model.sequence_length // size
    recomputed = FORWARD_PRODUCTS if model.remat in RECOMPUTING else 0
    products = FORWARD_PRODUCTS + recomputed + BACKWARD_PRODUCTS
    of_one_head = num_blocks * (num_blocks + 1) // 2 * 2 * size**2 * model.head_size * products
    heads_here = model.num_heads // mesh.tensor * (batch_size // mesh.data_parallel)
    return float(model.num_layers * heads_here * of_one_head)


def transfers(
    module: modules.Module, mesh_shape: dict[str, int], num_slices: int
) -> tuple[Transfer, ...]:
    """Collectives of one run by kind, mesh axes and whether they cross slices; the largest first.

    The compiler makes the program of one slice, and cuts a collective that spans slices into
    parts: collectives within the slice, and what is handed to the host to be exchanged with
    the chips at the same place of the other slices. That alone counts as crossing.

    Args:
      mesh_shape: of all slices together; they are the upper part of its first axis.
    Raises:
      CannotDo: the program is written in another way.
    """
    across, *_ = mesh_shape
    in_slice = {**mesh_shape, across: mesh_shape[across] // num_slices}
    if module.num_devices != (size := math.prod(in_slice.values())):
        raise CannotDo(
            f"the program is for {module.num_devices} chips, and a slice has {size}: this libtpu "
            "writes programs for slices in another way than libtpu 0.0.42"
        )
    found = [
        Transfer(kind, axes, False, **dataclasses.asdict(traffic))
        for (kind, axes), traffic in module.traffic(in_slice).items()
    ]
    crossing: dict[str, tuple[int, int]] = {}
    for _, this, times in module.executed():
        if this.opcode == "send" and (form := _BETWEEN_SLICES.search(this.attributes)):
            kind = form[1].lower().replace("_", "-")
            count, operand = crossing.get(kind, (0, 0))
            crossing[kind] = count + times, operand + times * this.shapes[0].num_bytes
    for kind, (count, operand) in crossing.items():
        # As modules.Collective counts, in a group of one chip a slice.
        others = num_slices - 1
        sent = {
            "all-gather": others * operand,
            "reduce-scatter": -(-others * operand // num_slices),
            "all-reduce": -(-2 * others * operand // num_slices),
            "all-to-all": -(-others * operand // num_slices),
        }.get(kind, operand)
        found.append(Transfer(kind, (across,), True, count, operand, sent))
    return tuple(sorted(found, key=lambda t: -t.sent_bytes))


_BETWEEN_SLICES = re.compile(r'"xla_megascale_runtime".*?_xla_megascale_transfer_type="(\w+)"')

# --- refusals -----------------------------------------------------------------------------

# Both figures count arguments in, "temporaries" or not.
_OUT_OF_MEMORY = (
    re.compile(r"Ran out of memory on HBM.*?\(([\d.]+[KMGTP]?)\) exceeds .*?\(([\d.]+[KMGTP]?)\)"),
    re.compile(
        r"Ran out of memory in memory space hbm\. Used ([\d.]+[KMGTP]?) of ([\d.]+[KMGTP]?)"
    ),
)
_UNITS = {unit: 1024**power for power, unit in enumerate(("", "K", "M", "G", "T", "P"))}


def refusal(message: str) -> Refusal:
    """What the compiler's error means."""
    first = message.strip().partition("\n")[0]
    for form in _OUT_OF_MEMORY:
        if found := form.search(message):
            return Refusal(first, *map(_bytes, found.groups()))
    return Refusal(first)


def _bytes(text: str) -> int:
    number, unit = re.fullmatch(r"([\d.]+?)\.?([KMGTP]?)", text).groups()  # type: ignore[union-attr]
    return int(float(number) * _UNITS[unit])


# --- what would help ----------------------------------------------------------------------


def advice(settings: config.Config, num_slices: int = 1) -> list[str]:
    """Settings, not yet in force, that make a step smaller; the cheapest to have first.

    Whether one of them is enough only the compiler knows.
    """
    model, numerics, mesh = settings.model, settings.numerics, settings.mesh
    length, lines = model.sequence_length, []
    if model.remat != "full":
        lines.append("model.remat=full: each layer is computed again in the backward pass")
    if numerics.microbatch > 1:
        half = numerics.microbatch // 2
        lines.append(f"numerics.microbatch={half}: fewer sequences at once")
    chunk = max((n for n in range(1, length // 8 + 1) if length % n == 0), default=1)
    if numerics.loss_chunk is None or numerics.loss_chunk > chunk:
        lines.append(f"numerics.loss_chunk={chunk}: logits of so many positions at once")
    can_splash = length % attention.LANES == 0 and model.head_size <= attention.LARGEST_HEAD
    if model.attention != "splash" and can_splash:
        lines.append("model.attention=splash: no matrix of scores")
    if mesh.data > num_slices and mesh.data % num_slices == 0:
        fsdp = mesh.fsdp * mesh.data // num_slices
        lines.append(f"mesh.data={num_slices} mesh.fsdp={fsdp}: the state in smaller slices")
    else:
        lines.append(
            f"mesh.fsdp={2 * mesh.fsdp} on twice the chips, or with a smaller mesh.tensor: the "
            "state in smaller slices"
        )
    if numerics.reduction == "canonical":
        lines.append("numerics.reduction=fast: sums in XLA's order, whose bits follow the mesh")
    return lines


# --- a sweep ------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Candidate:
    overrides: tuple[str, ...]  # of the config that was given
    settings: config.Config


def candidates(
    settings: config.Config, topology: topologies.Topology
) -> tuple[list[Candidate], int]:
    """Programs to try for the largest stage, those nearest to the config first.

    All combinations of model.remat (the configured one, full, dots), numerics.microbatch (the
    configured one, half and twice it) and mesh (the configured one, and mesh.tensor half and
    twice as large, with mesh.fsdp so that the chips are the same) that a config may have.
    numerics.lanes is raised where such a mesh is wider. At most SWEEP_LIMIT of them.

    Returns:
      The candidates, and how many more the grid has.
    """
    mesh, numerics, largest = settings.mesh, settings.numerics, max(settings.data.ramp.sizes)
    chips = topology.num_chips // mesh.data
    tensors = [mesh.tensor, mesh.tensor // 2, mesh.tensor * 2]
    microbatches = [numerics.microbatch, numerics.microbatch // 2, numerics.microbatch * 2]
    remats = list(dict.fromkeys([settings.model.remat, "full", "dots"]))
    grid = itertools.product(enumerate(tensors), enumerate(microbatches), enumerate(remats))
    found = []
    for (i, tensor), (j, microbatch), (k, remat) in grid:
        if not tensor or not microbatch or chips % tensor:
            continue
        width = mesh.data * (chips // tensor)
        changes = {
            "data.ramp.starts": "[0]",
            "data.ramp.sizes": f"[{largest}]",
            "mesh.fsdp": str(chips // tensor),
            "mesh.tensor": str(tensor),
            "numerics.microbatch": str(microbatch),
            "numerics.lanes": str(max(numerics.lanes, width)),
            "model.remat": remat,
        }
        overrides = [f"{key}={value}" for key, value in changes.items()]
        try:
            tried = config.override(settings, overrides)
        except WrongInput:  # the grid's, not the user's: such a config cannot be
            continue
        changed = config.differences(settings, tried)
        shown = tuple(text for text in overrides if text.partition("=")[0] in changed)
        num_changes = (i > 0) + (j > 0) + (k > 0)
        found.append((num_changes, Candidate(shown, tried)))
    found.sort(key=lambda pair: pair[0])
    ordered = [candidate for _, candidate in found]
    return ordered[:SWEEP_LIMIT], max(0, len(ordered) - SWEEP_LIMIT)


def by_merit(answers: collections.abc.Iterable[tuple[Any, Answer]]) -> list[tuple[Any, Answer]]:
    """Best first: what fits by its estimated time, then the others by bytes over the limit."""

    def merit(pair: tuple[Any, Answer]) -> tuple[bool, float]:
        this = pair[1]
        if this.fits:
            return False, math.inf if this.estimated_step_s is None else this.estimated_step_s
        return True, this.hbm_peak_bytes - this.hbm_limit_bytes if this.hbm_peak_bytes else math.inf

    return sorted(answers, key=merit)
