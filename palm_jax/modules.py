"""What XLA made of a program: the text of an optimized HLO module, read.

  module = modules.read(compiled.as_text())
  module.collectives({"data": 2, "fsdp": 4})   # what travels, over which mesh axes, how often
  module.executed_counts()                     # operations, times the trip counts of loops

The text is all that is needed: neither JAX nor a device. Understood are the optimized modules
of XLA:CPU and XLA:TPU. A module is a list of computations, each a list of instructions;
loops, branches, calls and fusions name the computations that they execute. Nothing is
executed here: counts follow the calls from the entry and multiply by trip counts.

A conditional counts every branch as if taken, so with one in the program counts are upper
bounds. Functions applied to elements (the `add` of a reduce) stand in a module, but how often
they run is the backend's affair: they are no part of executed counts.
"""

from __future__ import annotations

import collections
import collections.abc
import dataclasses
import functools
import graphlib
import itertools
import math
import operator
import re
from typing import NamedTuple

from palm_jax.errors import CannotDo, WrongInput

Groups = tuple[tuple[int, ...], ...]  # of device numbers

# --- text against text --------------------------------------------------------------------

_STRING = r'"(?:[^"\\]|\\.)*"'


def _braces(depth: int) -> str:
    """A pattern of balanced braces, up to a depth, in which strings may hold any."""
    inner = _STRING if depth == 0 else f"{_STRING}|{_braces(depth - 1)}"
    return rf'\{{(?:[^{{}}"]|{inner})*\}}'


_METADATA = re.compile(", metadata=" + _braces(2))
_TABLES = re.compile(
    r"^(?:FileNames|FunctionNames|FileLocations|StackFrames)\n(?:\d+ .*\n)*", re.MULTILINE
)
_GROUPS = (
    r"(?:mesh\[[^\]]*\](?:, device_ids=\([^)]*\)(?:\))?)? \{[^}]*\}"  # named axes of a mesh
    r"|\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?"  # a reshaped, transposed iota
    r"|\{(?:\{[\d,]*\},?)*\})"  # lists
)
_DEVICE_ATTRIBUTES = re.compile(
    rf", (?:replica_groups={_GROUPS}|source_target_pairs=\{{(?:\{{[\d,]*\}},?)*\}}"
    r"|channel_id=\d+|use_global_device_ids=\w+|num_partitions=\d+|replica_count=\d+"
    rf"|sharding={_braces(4)})"
)
# How a TPU collective is routed, its scratch memory and barrier, and known bits of indices.
_DEVICE_NOTES = re.compile(
    rf',?"(?:collective_algorithm_config":{_braces(4)}(?:,"used_scoped_memory_configs":\[[^\]]*\])?'
    rf'|(?:barrier_config|indices_config)":{_braces(4)})'
)
_NUM_PARTITIONS = re.compile(r"^HloModule .*?\bnum_partitions=(\d+)")


def without_places(text: str) -> str:
    """A module's text without metadata, file names, lines and stack frames."""
    return _TABLES.sub("", _METADATA.sub("", text))


def without_devices(text: str) -> str:
    """A module's text without places, and without what merely numbers devices.

    Equal texts mean that each device of one set computes what each of the other does, in the
    same order. Taken out are groups and pairs of devices, channels, the number of partitions,
    shardings, tables indexed by device, and how the TPU compiler routes collectives. So which
    devices a collective joins is not compared; for that see `Module.collectives`.
    """
    body = _DEVICE_NOTES.sub("", _DEVICE_ATTRIBUTES.sub("", without_places(text)))
    partitions = _NUM_PARTITIONS.match(text)
    if partitions:
        # Tables from device number to coordinate; of long ones the contents are not printed.
        table = rf"\b([su]32)\[{partitions[1]}\](?:\{{[^{{}}]*\}})?( constant\(\{{[^()]*\}}\))?"
        body = re.sub(table, r"\1[devices]", body)
    return body


# --- the parts of a module ----------------------------------------------------------------

_BITS = {
    **dict.fromkeys(("s1", "u1"), 1),
    **dict.fromkeys(("s2", "u2"), 2),
    **dict.fromkeys(("s4", "u4", "f4e2m1fn"), 4),
    **dict.fromkeys(("pred", "s8", "u8", "f8e3m4", "f8e4m3", "f8e4m3b11fnuz"), 8),
    **dict.fromkeys(("f8e4m3fn", "f8e4m3fnuz", "f8e5m2", "f8e5m2fnuz", "f8e8m0fnu"), 8),
    **dict.fromkeys(("s16", "u16", "f16", "bf16"), 16),
    **dict.fromkeys(("s32", "u32", "f32"), 32),
    **dict.fromkeys(("s64", "u64", "f64", "c64"), 64),
    "c128": 128,
    **dict.fromkeys(("token", "opaque"), 0),
}
_SHAPE = re.compile(r"\b([a-z]\w*)\[([^\]]*)\]")
# Attributes that name computations which run when their instruction does.
_CALLS = re.compile(
    r", (body|condition|calls|to_apply|true_computation|false_computation|branch_computations)"
    r"=(\{[^}]*\}|%?[\w.\-]+)"
)
_NAME = re.compile(r"%([\w.\-]+)")
_ESTIMATE = re.compile(r'"estimated_cycles":"?(\d+)')
_NO_ESTIMATE = 2**63 - 1  # stands where v5p and v6e hand a scatter to their sparse cores
_TRIPS = re.compile(r'"known_trip_count":\{"n":"?(\d+)')
_OP_NAME = re.compile(r'\bop_name="((?:[^"\\]|\\.)*)"')
_REPLICA_GROUPS = re.compile(f", replica_groups=({_GROUPS})")
_PAIRS = re.compile(r", source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")
_CHANNEL = re.compile(r", channel_id=(\d+)")
_TARGET = re.compile(r', custom_call_target="([^"]*)"')
_SLICE_SIZES = re.compile(r", slice_sizes=\{((?:\{[\d,]*\},?)*)\}")


class Shape(NamedTuple):
    """An array's element type (as HLO names it: f32, bf16, s32, pred) and sizes."""

    element_type: str
    sizes: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes without padding to tiles; elements below a byte are packed."""
        if self.element_type not in _BITS:
            raise CannotDo(
                f"the element type {self.element_type} in an HLO module is unknown to this "
                "version of palm_jax; add its size to palm_jax/modules.py"
            )
        return -(-math.prod(self.sizes) * _BITS[self.element_type] // 8)

    def __str__(self) -> str:
        return f"{self.element_type}[{','.join(map(str, self.sizes))}]"


@dataclasses.dataclass(frozen=True)
class Instruction:
    name: str
    opcode: str
    result: str  # its type as printed, with layouts; a tuple in parentheses
    arguments: str  # between the opcode's parentheses, as printed
    attributes: str  # the rest, as printed
    is_root: bool

    @functools.cached_property
    def shapes(self) -> tuple[Shape, ...]:
        """Arrays of the result; a tuple's are flattened. A bounded size is its bound."""
        return tuple(
            Shape(kind, tuple(int(size.strip("<= ")) for size in sizes.split(",") if size))
            for kind, sizes in _SHAPE.findall(self.result)
        )

    @functools.cached_property
    def operands(self) -> tuple[str, ...]:
        """Names of operands, in order."""
        if self.opcode in ("parameter", "constant"):
            return ()
        if "%" in self.arguments:
            return tuple(_NAME.findall(self.arguments))
        bare = re.sub(r"/\*.*?\*/", "", self.arguments).split(",")
        return tuple(word.split()[-1] for word in bare if word.strip())

    @functools.cached_property
    def calls(self) -> tuple[tuple[str, str], ...]:
        """(role, computation) for each computation that it names; a branch is a role."""
        found = _CALLS.findall(self.attributes)
        return tuple(
            (role, name.strip().lstrip("%"))
            for role, names in found
            for name in names.strip("{}").split(",")
        )

    def called(self, role: str) -> str:
        return dict(self.calls)[role]

    @functools.cached_property
    def replica_groups(self) -> Groups | None:
        """Groups of devices that communicate; () where that is all devices together."""
        found = _REPLICA_GROUPS.search(self.attributes)
        if found is None and ", replica_groups=" in self.attributes:
            raise CannotDo(
                f"replica_groups of {self.name} in an HLO module are written in an unknown way: "
                f"{self.attributes[:200]!r}; teach palm_jax/modules.py to read them"
            )
        return groups_of(found[1]) if found else None

    @functools.cached_property
    def source_target_pairs(self) -> tuple[tuple[int, int], ...] | None:
        found = _PAIRS.search(self.attributes)
        return _pairs_of(found[1]) if found else None

    @property
    def channel(self) -> int | None:
        found = _CHANNEL.search(self.attributes)
        return int(found[1]) if found else None

    @property
    def custom_call_target(self) -> str | None:
        found = _TARGET.search(self.attributes)
        return found[1] if found else None

    @property
    def known_trips(self) -> int | None:
        """The trip count that the compiler wrote beside a loop."""
        found = _TRIPS.search(self.attributes)
        return int(found[1]) if found else None

    @property
    def estimated_cycles(self) -> int | None:
        """The TPU compiler's estimate for one execution; None if it has none."""
        found = _ESTIMATE.search(self.attributes)
        return int(found[1]) if found and int(found[1]) != _NO_ESTIMATE else None

    @property
    def op_name(self) -> str:
        """Where in the traced program it comes from; "" where that is not said."""
        found = _OP_NAME.search(self.attributes)
        return found[1] if found else ""


@dataclasses.dataclass(frozen=True)
class Computation:
    name: str
    instructions: dict[str, Instruction]  # by name, in the order of the text

    @functools.cached_property
    def root(self) -> Instruction:
        return next(i for i in self.instructions.values() if i.is_root)

    @functools.cached_property
    def parameters(self) -> dict[str, int]:
        """Numbers of parameters by their names."""
        return {
            i.name: int(i.arguments) for i in self.instructions.values() if i.opcode == "parameter"
        }


# --- groups of devices --------------------------------------------------------------------


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(",") if number.strip())


def _transposed_iota(
    shape: tuple[int, ...], permutation: tuple[int, ...] | None
) -> collections.abc.Iterator[int]:
    """Numbers 0, 1, ... laid out in `shape`, axes permuted, read row by row."""
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    order = permutation or range(len(shape))
    steps = [range(0, shape[axis] * strides[axis], strides[axis]) for axis in order]
    return map(sum, itertools.product(*steps))


@functools.lru_cache(maxsize=4096)
def groups_of(text: str) -> Groups:
    """The device groups that a `replica_groups` attribute describes.

    Args:
      text: lists `{{0,1},{2,3}}`; an iota `[2,4]<=[4,2]T(1,0)`, that is 0..7 as [4,2],
        transposed and cut into 2 groups of 4; or axes of a mesh, `mesh['a'=2,'b'=4] {'b'}`,
        where `'b':(2)2` would be the part of axis b below its major factor 2.
    Returns:
      Groups in order, () where the text is `{}`: all devices in one group.
    """
    if text.startswith("{"):
        return tuple(_numbers(group) for group in re.findall(r"\{([\d,]*)\}", text[1:-1]))
    if text.startswith("["):
        parts = re.fullmatch(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
        assert parts, text
        devices = tuple(_transposed_iota(_numbers(parts[2]), parts[3] and _numbers(parts[3])))  # type: ignore[arg-type]
        size = _numbers(parts[1])[-1]
        return tuple(devices[at : at + size] for at in range(0, len(devices), size))
    return _groups_of_mesh_axes(text)


def _groups_of_mesh_axes(text: str) -> Groups:
    parts = re.fullmatch(r"mesh\[([^\]]*)\](?:, device_ids=\((.*)\))? \{([^}]*)\}", text)
    assert parts, text
    sizes = {
        name.strip().strip("'\""): int(size)
        for name, size in (axis.rsplit("=", 1) for axis in parts[1].split(",") if axis)
    }
    order = parts[2]
    if order is None:
        devices = tuple(range(math.prod(sizes.values())))
    elif order.startswith("["):
        iota = re.fullmatch(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", order)
        assert iota, text
        devices = tuple(_transposed_iota(_numbers(iota[1]), iota[2] and _numbers(iota[2])))  # type: ignore[arg-type]
    else:
        devices = _numbers(order)
    # An axis falls into (major, used, minor) factors; whole axes are used wholly.
    used: dict[str, list[tuple[int, int, int]]] = {}  # (major, size, place) of each part
    for place, axis in enumerate(axis for axis in parts[3].split(",") if axis):
        named = re.fullmatch(r"\s*['\"]?(.*?)['\"]?(?::\((\d+)\)(\d+))?", axis)
        assert named, text
        size = sizes[named[1]]
        major, part = (int(named[2]), int(named[3])) if named[2] else (1, size)
        used.setdefault(named[1], []).append((major, part, place))
    factors: list[tuple[int, int | None]] = []  # (size, place among the used ones)
    for name, size in sizes.items():
        done = 1
        for major, part, place in sorted(used.get(name, [])):
            factors += [(major // done, None), (part, place)]
            done = major * part
        factors.append((size // done, None))
    inside = sorted((place, at) for at, (_, place) in enumerate(factors) if place is not None)
    outside = [at for at, (_, place) in enumerate(factors) if place is None]
    permutation = (*outside, *(at for _, at in inside))
    shape = tuple(size for size, _ in factors)
    ordered = [devices[at] for at in _transposed_iota(shape, permutation)]
    length = math.prod(shape[at] for _, at in inside)
    return tuple(tuple(ordered[at : at + length]) for at in range(0, len(ordered), length))


@functools.lru_cache(maxsize=4096)
def _pairs_of(text: str) -> tuple[tuple[int, int], ...]:
    return tuple((int(a), int(b)) for a, b in re.findall(r"\{(\d+),(\d+)\}", text))


@functools.lru_cache(maxsize=4096)
def _connected(pairs: tuple[tuple[int, int], ...]) -> Groups:
    """Sets of devices that pairs of source and target connect."""
    group_of: dict[int, set[int]] = {}
    for pair in pairs:
        joined = set().union(*(group_of.get(device, {device}) for device in pair))
        group_of |= dict.fromkeys(joined, joined)
    distinct = {id(group): group for group in group_of.values()}
    return tuple(sorted(tuple(sorted(group)) for group in distinct.values()))


@functools.lru_cache(maxsize=4096)
def _varying_axes(groups: Groups, mesh: tuple[tuple[str, int], ...]) -> tuple[str, ...]:
    """Mesh axes whose coordinates differ within a group."""
    axes, stride = [], math.prod(size for _, size in mesh)
    for name, size in mesh:
        stride //= size
        if any(len({device // stride % size for device in group}) > 1 for group in groups):
            axes.append(name)
    return tuple(axes)


# --- what a module does -------------------------------------------------------------------

COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
)


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a module, seen from one device.

    `operand_bytes` are those of its operands on one device, once. `sent_bytes` are what one
    device sends, once, in a group of g, if no byte takes a detour (rounded up):

      all-gather               (g - 1) x operand                 each device's part to all others
      reduce-scatter           (g - 1) / g x operand             a ring, or directly
      all-reduce               2 (g - 1) / g x operand           reduce-scatter, then all-gather
      all-to-all               (g - 1) / g x operand             all but one's own slice
      ragged-all-to-all        operand                           an upper bound
      collective-permute       operand                           by a device that is a source
      collective-broadcast     operand                           passed on along a chain

    Where an algorithm forwards what is not its own (an all-to-all on a torus), links carry
    more. Elements count in the type that they have in the module.
    """

    kind: str  # of COLLECTIVES
    name: str  # of its instruction
    op_name: str
    count: int  # executions in one run of the module
    operand_bytes: int
    sent_bytes: int
    axes: tuple[str, ...] | None  # mesh axes whose coordinates vary within a group
    group_size: int  # the largest; of a permutation, the devices that its pairs connect

    @property
    def total_operand_bytes(self) -> int:
        return self.count * self.operand_bytes

    @property
    def total_sent_bytes(self) -> int:
        return self.count * self.sent_bytes


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Collectives of one kind over the same axes, added up: by one device in one run."""

    count: int
    operand_bytes: int
    sent_bytes: int


class Contraction(NamedTuple):
    """A kind of matrix product, convolution or kernel."""

    operation: str  # dot, convolution or the target of a custom call
    result: str  # such as "bf16[8,512]"; several arrays are separated by spaces


class Loop(NamedTuple):
    name: str
    op_name: str
    trips: int | None  # iterations each time that it is reached; None if not to be found


# Custom calls that stand for products, and Pallas kernels, whose inside is not in the text.
_HEAVY_TARGET = re.compile(r"matmul|gemm|conv(?!ert)|dot|tpu_custom_call", re.IGNORECASE)

_COMPARISONS = {
    "LT": operator.lt,
    "LE": operator.le,
    "GT": operator.gt,
    "GE": operator.ge,
    "NE": operator.ne,
    "EQ": operator.eq,
}
_MIRRORED = {"LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE", "NE": "NE", "EQ": "EQ"}


class _Integer(NamedTuple):
    """An integer known up to what one element of a loop's state holds: element + offset."""

    element: int | None  # None: a constant; -1: the state is one scalar
    offset: int


@dataclasses.dataclass(frozen=True)
class Module:
    """An optimized HLO module.

    Counts are for one run on one device; in a partitioned module all devices run the same.
    Methods that need trip counts raise CannotDo where one was neither found nor given.
    """

    name: str
    num_devices: int  # replicas x partitions
    computations: dict[str, Computation]
    entry: str
    unknown_trips: int | None = None  # taken for loops whose trip count cannot be found

    # -- loops --

    @functools.cached_property
    def loops(self) -> tuple[Loop, ...]:
        """Every loop with its trip count, in the order of the text."""
        return tuple(
            Loop(i.name, i.op_name, self._found_trips(computation, i))
            for computation in self.computations.values()
            for i in computation.instructions.values()
            if i.opcode == "while"
        )

    def _trips(self, loop: Instruction) -> int:
        found = self._loops_by_name[loop.name].trips
        trips = self.unknown_trips if found is None else found
        if trips is None:
            raise CannotDo(
                f"how often the loop {loop.name} ({loop.op_name or 'of unknown origin'}) of "
                f"module {self.name} runs cannot be found in its text; "
                "give read() a number to take for such loops, unknown_trips"
            )
        return trips

    @functools.cached_property
    def _loops_by_name(self) -> dict[str, Loop]:
        return {loop.name: loop for loop in self.loops}

    @functools.cached_property
    def _loop_of_body(self) -> dict[str, tuple[Computation, Instruction]]:
        """The loop that has a computation as its body, and where the loop stands."""
        return {
            i.called("body"): (computation, i)
            for computation in self.computations.values()
            for i in computation.instructions.values()
            if i.opcode == "while"
        }

    def _found_trips(self, where: Computation, loop: Instruction) -> int | None:
        """The compiler's own count, else from start, step and limit of the counter."""
        if loop.known_trips is not None:
            return loop.known_trips
        compared = self._comparison(self.computations[loop.called("condition")])
        if compared is None:
            return None
        left, direction, right = compared
        body = self.computations[loop.called("body")]

        def step(side: _Integer) -> int | None:
            """What an iteration adds to the element; 0 for a constant."""
            if side.element is None:
                return 0
            after = self._element(body, body.root, side.element)
            return after.offset if after and after.element == side.element else None

        def start(side: _Integer) -> int | None:
            if side.element is None:
                return side.offset
            first = self._before(where, loop, side.element)
            return None if first is None else first + side.offset

        if step(left) == 0:  # the limit stands on the left
            left, direction, right = right, _MIRRORED[direction], left
        by, first, limit = step(left), start(left), start(right)
        if not by or step(right) != 0 or first is None or limit is None:
            return None
        if not _COMPARISONS[direction](first, limit):
            return 0
        if direction in ("LE", "GE"):
            limit += 1 if direction == "LE" else -1
        way = limit - first
        # Away from the limit, or over it, until the counter wraps around.
        endless = way * by <= 0 or (direction == "NE" and way % by != 0)
        return None if endless or direction == "EQ" else -(-way // by)  # rounded up

    def _before(self, where: Computation, loop: Instruction, element: int) -> int | None:
        """An element of a loop's state before the first iteration."""
        state = where.instructions[loop.operands[0]]
        value = self._element(where, state, element)
        if value is None or value.element is None:
            return value and value.offset
        # It comes from the state of an enclosing loop, which must leave it alone.
        outer = self._loop_of_body.get(where.name)
        if outer is None or self._element(where, where.root, value.element) != (value.element, 0):
            return None
        above = self._before(*outer, value.element)
        return None if above is None else above + value.offset

    # -- integers, as far as counters of loops need them --

    def _comparison(
        self, condition: Computation, given: tuple[_Integer | None, ...] | None = None
    ) -> tuple[_Integer, str, _Integer] | None:
        """What a loop's condition compares: (left, direction, right)."""
        root = condition.root
        while root.opcode in ("copy", "bitcast", "convert"):
            root = condition.instructions[root.operands[0]]
        if root.opcode in ("fusion", "call"):
            inner = tuple(self._integer(condition, name, given) for name in root.operands)
            return self._comparison(self.computations[root.calls[0][1]], inner)
        direction = re.search(r", direction=(\w+)", root.attributes)
        if root.opcode != "compare" or direction is None:
            return None
        left, right = (self._integer(condition, name, given) for name in root.operands)
        return (left, direction[1], right) if left and right else None

    def _integer(
        self, where: Computation, name: str, given: tuple[_Integer | None, ...] | None = None
    ) -> _Integer | None:
        """A scalar integer of a computation, if it can be known.

        Args:
          given: arguments of a fused or called computation; None in a loop's body or condition
            (or the entry), whose one parameter is the loop's state.
        """
        this = where.instructions[name]
        if this.opcode == "constant":
            literal = re.fullmatch(r"-?\d+", this.arguments)
            return _Integer(None, int(literal[0])) if literal else None
        if this.opcode == "parameter":
            return given[where.parameters[name]] if given is not None else _Integer(-1, 0)
        if this.opcode == "get-tuple-element":
            index = re.search(r", index=(\d+)", this.attributes)
            assert index, this
            source = where.instructions[this.operands[0]]
            return self._element(where, source, int(index[1]), given)
        if this.opcode in ("copy", "bitcast", "convert", "reshape", "copy-done", "copy-start"):
            return self._integer(where, this.operands[0], given)
        if this.opcode in ("fusion", "call"):
            inner = tuple(self._integer(where, operand, given) for operand in this.operands)
            called = self.computations[this.calls[0][1]]
            return self._integer(called, called.root.name, inner)
        if this.opcode in ("add", "subtract"):
            left, right = (self._integer(where, operand, given) for operand in this.operands)
            if this.opcode == "subtract" and right is not None:
                right = _Integer(None, -right.offset) if right.element is None else None
            if left is None or right is None or None not in (left.element, right.element):
                return None
            element = right.element if left.element is None else left.element
            return _Integer(element, left.offset + right.offset)
        return None

    def _element(
        self,
        where: Computation,
        this: Instruction,
        element: int,
        given: tuple[_Integer | None, ...] | None = None,
    ) -> _Integer | None:
        """A scalar integer that is an element of a tuple."""
        if element == -1:
            return self._integer(where, this.name, given)
        if this.opcode == "tuple":
            return self._integer(where, this.operands[element], given)
        if this.opcode == "parameter":
            return _Integer(element, 0) if given is None else None
        if this.opcode in ("copy", "bitcast", "opt-barrier"):
            return self._element(where, where.instructions[this.operands[0]], element, given)
        if this.opcode in ("fusion", "call"):
            inner = tuple(self._integer(where, operand, given) for operand in this.operands)
            called = self.computations[this.calls[0][1]]
            return self._element(called, called.root, element, inner)
        if this.opcode == "while":
            # A loop that leaves the element alone passes on what it was given.
            body = self.computations[this.called("body")]
            if self._element(body, body.root, element) != (element, 0):
                return None
            return self._element(where, where.instructions[this.operands[0]], element, given)
        return None

    # -- counts --

    @staticmethod
    def _executes(i: Instruction) -> collections.abc.Iterator[tuple[str, str]]:
        """(role, computation) for what an instruction executes, and does not apply to elements."""
        if i.opcode in ("while", "conditional", "call", "call-start", "fusion"):
            yield from i.calls
        elif i.opcode.endswith("-start"):
            # An asynchronous operation's update and done name what its start executes.
            yield from (call for call in i.calls if call[0] == "calls")

    @functools.cached_property
    def executions(self) -> dict[str, int]:
        """How often each computation runs in one run of the module, callers first.

        Raises:
          CannotDo: a loop's trip count is unknown.
        """
        edges: dict[str, list[tuple[str, int]]] = {}
        todo = [self.entry]
        while todo:
            if (name := todo.pop()) in edges:
                continue
            edges[name] = []
            for i in self.computations[name].instructions.values():
                for role, called in self._executes(i):
                    # A loop's condition also finds that it is over.
                    times = self._trips(i) + (role == "condition") if i.opcode == "while" else 1
                    edges[name].append((called, times))
                    todo.append(called)
        callees = {name: [called for called, _ in calls] for name, calls in edges.items()}
        counts = dict.fromkeys(reversed([*graphlib.TopologicalSorter(callees).static_order()]), 0)
        counts[self.entry] = 1
        for name, times in counts.items():
            for called, calls in edges[name]:
                counts[called] += times * calls
        return counts

    def executed(self) -> collections.abc.Iterator[tuple[Computation, Instruction, int]]:
        """Each instruction that runs, where it stands, and how often it does."""
        for computation in self.computations.values():
            if times := self.executions.get(computation.name, 0):
                for i in computation.instructions.values():
                    yield computation, i, times

    def operation_counts(self) -> collections.Counter[str]:
        """How often each opcode stands in the module: in fusions, loops and functions applied
        to elements too, once each."""
        return collections.Counter(
            i.opcode
            for computation in self.computations.values()
            for i in computation.instructions.values()
        )

    def executed_counts(self) -> collections.Counter[str]:
        """How often operations of each opcode run, trip counts multiplied in.

        Inside fusions too. A loop's condition runs once more than its body.
        """
        counts: collections.Counter[str] = collections.Counter()
        for _, i, times in self.executed():
            counts[i.opcode] += times
        return counts

    def contractions(self, executed: bool = True) -> collections.Counter[Contraction]:
        """Matrix products, convolutions, and custom calls that stand for them or for Pallas
        kernels, by the arrays that they give: how often they run, or stand in the module."""
        counts: collections.Counter[Contraction] = collections.Counter()
        standing = (
            (i, 1)
            for computation in self.computations.values()
            for i in computation.instructions.values()
        )
        running = ((i, times) for _, i, times in self.executed()) if executed else standing
        for i, times in running:
            operation = i.custom_call_target or i.opcode
            if i.opcode in ("dot", "convolution") or (
                i.opcode == "custom-call" and _HEAVY_TARGET.search(operation)
            ):
                counts[Contraction(operation, " ".join(map(str, i.shapes)))] += times
        return counts

    def estimated_cycles(self) -> int | None:
        """The TPU compiler's own estimate of one run's cycles on one core, trip counts in.

        An estimate and not a measurement. It is a sum: nothing overlaps. It leaves out
        collectives, copies between memories that run beside the computation, and custom
        calls (Pallas kernels), so compare like with like. None where the compiler wrote no
        estimate, as on CPU.
        """
        # A fusion's estimate covers what is fused.
        fused = {
            name
            for computation in self.computations.values()
            for i in computation.instructions.values()
            if i.opcode == "fusion"
            for _, name in i.calls
        }
        estimates = [
            (i.estimated_cycles, times)
            for computation, i, times in self.executed()
            if computation.name not in fused
        ]
        known = [cycles * times for cycles, times in estimates if cycles is not None]
        return sum(known) if known else None

    # -- collectives --

    def collectives(
        self, mesh_shape: collections.abc.Mapping[str, int] | None = None
    ) -> list[Collective]:
        """Every collective that runs, an asynchronous one once.

        Args:
          mesh_shape: axes and sizes, as `jax.sharding.Mesh.shape`, of the mesh that the module
            was compiled for; devices are numbered row by row. Without it, axes are None.
        Raises:
          WrongInput: the mesh has another number of devices.
          CannotDo: a loop's trip count is unknown, or an asynchronous collective is written
            in a way that this reader does not know.
        """
        mesh = None if mesh_shape is None else tuple(mesh_shape.items())
        if mesh and (size := math.prod(size for _, size in mesh)) != self.num_devices:
            raise WrongInput(
                f"a mesh of {dict(mesh)} has {size} devices, but module {self.name} was "
                f"compiled for {self.num_devices}; give the mesh that it was compiled for"
            )
        self._check_chains()
        return [
            self._collective(computation, i, kind, times, mesh)
            for computation, i, times in self.executed()
            if (kind := self._kind(computation, i))
        ]

    def traffic(
        self, mesh_shape: collections.abc.Mapping[str, int]
    ) -> dict[tuple[str, tuple[str, ...]], Traffic]:
        """Collectives of one run, by kind and mesh axes; the arguments of `collectives`."""
        totals: dict[tuple[str, tuple[str, ...]], Traffic] = {}
        for c in self.collectives(mesh_shape):
            key = (c.kind, c.axes or ())
            so_far = totals.get(key, Traffic(0, 0, 0))
            totals[key] = Traffic(
                count=so_far.count + c.count,
                operand_bytes=so_far.operand_bytes + c.total_operand_bytes,
                sent_bytes=so_far.sent_bytes + c.total_sent_bytes,
            )
        return totals

    @staticmethod
    def _chain(i: Instruction) -> str | None:
        """The chain of a TPU collective that runs beside fusions. Each fusion on its way holds
        a copy of the instruction."""
        if '"async_collective_fusion_config"' not in i.attributes:
            return None
        found = re.search(r'\bchain_id="(\d+)"', i.attributes)
        return found and f"{i.opcode} of chain {found[1]}"

    @staticmethod
    def _starts(where: Computation) -> frozenset[str]:
        """Names of instructions in a computation that begin a chain."""
        return frozenset(
            operand
            for i in where.instructions.values()
            if i.opcode == "custom-call" and i.custom_call_target == "AsyncCollectiveStart"
            for operand in i.operands
        )

    def _check_chains(self) -> None:
        begun, seen = set(), set()
        for where in self.computations.values():
            for i in where.instructions.values():
                if chain := self._chain(i):
                    seen.add(chain)
                    if i.name in self._starts(where):
                        begun.add(chain)
        if seen - begun:
            raise CannotDo(
                f"module {self.name} has an asynchronous {min(seen - begun)} without an "
                "AsyncCollectiveStart: this compiler writes them in another way than libtpu "
                "0.0.42; count its collectives by hand"
            )

    def _kind(self, where: Computation, i: Instruction) -> str | None:
        """The kind of collective that an instruction begins, if it does."""
        kind = i.opcode.removesuffix("-start")
        if kind not in COLLECTIVES:
            return None
        if kind != i.opcode and any(role == "calls" for role, _ in i.calls):
            return None  # it stands in the computation that is called
        if self._chain(i) and i.name not in self._starts(where):
            return None
        # XLA:TPU writes some reduce-scatters as a fusion of an all-reduce and a slice.
        if kind == "all-reduce" and where.name.startswith("all-reduce-scatter"):
            return "reduce-scatter"
        return kind

    def _collective(
        self,
        where: Computation,
        i: Instruction,
        kind: str,
        times: int,
        mesh: tuple[tuple[str, int], ...] | None,
    ) -> Collective:
        if kind == "collective-permute":
            pairs = i.source_target_pairs or ()
            groups = _connected(pairs)
            moves = any(source != target for source, target in pairs)
        else:
            groups = i.replica_groups or (tuple(range(self.num_devices)),)
            moves = True
        size = max(map(len, groups), default=1)
        operand = self._operand_bytes(where, i)
        sent = {
            "all-gather": (size - 1) * operand,
            "reduce-scatter": -(-(size - 1) * operand // size),
            "all-reduce": -(-2 * (size - 1) * operand // size),
            "all-to-all": -(-(size - 1) * operand // size),
        }
        return Collective(
            kind=kind,
            name=i.name,
            op_name=i.op_name,
            count=times,
            operand_bytes=operand,
            sent_bytes=sent.get(kind, operand if moves else 0),
            axes=None if mesh is None else _varying_axes(groups, mesh),
            group_size=size,
        )

    @staticmethod
    def _operand_bytes(where: Computation, i: Instruction) -> int:
        arrays = [shape for name in i.operands for shape in where.instructions[name].shapes]
        if sliced := _SLICE_SIZES.search(i.attributes):
            # A permutation of slices: source, target and places within them are operands.
            parts = re.findall(r"\{([\d,]*)\}", sliced[1])
            return sum(
                Shape(array.element_type, _numbers(part)).num_bytes
                for array, part in zip(arrays, parts, strict=False)
            )
        if i.opcode.startswith("ragged-all-to-all"):
            arrays = arrays[:1]  # then the output and the offsets
        return sum(array.num_bytes for array in arrays)


# --- reading ------------------------------------------------------------------------------

_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+) (?:\(.*\) -> .*)?\{$")
# A tuple's type ends at the first parenthesis that an opcode follows: layouts hold no spaces.
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([a-z][\w\-]*)\(")
_PARENTHESIS = re.compile(r"[()]")
_STRINGS = re.compile(_STRING)


def _unfinished(text: str) -> bool:
    """Whether an instruction goes on in the next line, as Pallas kernels' metadata do."""
    bare = _STRINGS.sub("", text)
    return '"' in bare or bare.count("{") > bare.count("}")


def _instruction(head: re.Match[str], text: str) -> Instruction:
    root, name, result, opcode = head.groups()
    begin = head.end()
    end = text.find(")", begin)
    if text.find("(", begin, end) >= 0:
        depth = 1
        for mark in _PARENTHESIS.finditer(text, begin):
            depth += 1 if mark[0] == "(" else -1
            if depth == 0:
                end = mark.start()
                break
    return Instruction(name, opcode, result, text[begin:end], text[end + 1 :], bool(root))


def read(text: str, unknown_trips: int | None = None) -> Module:
    """A module from what `compiled.as_text()` gives.

    Args:
      unknown_trips: taken for loops whose trip count cannot be found, such as those that end
        on a computed value. Without it they are an error where counts need them;
        `Module.loops` shows which they are.
    Raises:
      WrongInput: the text is not that of an HLO module.
    """
    header = re.match(r"\s*HloModule ([^\s,]+)(.*)", text)
    if header is None:
        raise WrongInput(
            f"not the text of an HLO module, which begins with HloModule: {text[:60]!r}; "
            "give what compiled.as_text() returns"
        )
    counts = (
        re.search(rf", {key}=(\d+)", header[2]) for key in ("num_partitions", "replica_count")
    )
    num_devices = math.prod(int(found[1]) for found in counts if found)
    computations: dict[str, Computation] = {}
    entry = ""
    inside: Computation | None = None
    head: re.Match[str] | None = None  # of the instruction that is being read
    lines: list[str] = []  # of that instruction; most have one

    def finish() -> None:
        if inside is not None and head is not None:
            this = _instruction(head, "\n".join(lines))
            inside.instructions[this.name] = this

    for line in text.split("\n"):
        if inside is None:
            if line.endswith("{") and (opened := _COMPUTATION.match(line)):
                inside = computations[opened[2]] = Computation(opened[2], {})
                entry = opened[2] if opened[1] else entry
            continue
        begun = _INSTRUCTION.match(line)
        if head is not None and begun is None and _unfinished("\n".join(lines)):
            lines.append(line)
        elif begun is not None:
            finish()
            head, lines = begun, [line]
        elif line.startswith("}"):
            finish()
            inside, head = None, None
        elif line.strip():
            raise WrongInput(
                f"a line of HLO module {header[1]} cannot be read: {line[:200]!r}; "
                "give what compiled.as_text() returns"
            )
    if not entry or inside is not None:
        raise WrongInput(f"HLO module {header[1]} is cut off: its ENTRY computation does not end")
    return Module(header[1], num_devices, computations, entry, unknown_trips)
