"""Reading optimized HLO modules: hand-written text with hand-made sums, and compiled programs."""

from __future__ import annotations

import collections
import importlib.util
import operator
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from palm_jax import modules
from palm_jax.errors import CannotDo, WrongInput
from palm_jax.modules import Contraction, Traffic


def hlo(text: str) -> str:
    """A module as XLA prints it: lines that are indented further belong to the one before."""
    return re.sub(r"\n {4,}", " ", text)


# A loop of 3 around one of 4, the inner one's count to be found from its condition:
# i = 2, 5, 8, 11 while i < 12, both numbers handed in from outside.
NESTED = hlo("""\
HloModule jit_nested, is_scheduled=true, entry_computation_layout={(f32[8,16]{1,0})->f32[]}

FileNames
1 "/somewhere/a.py"

StackFrames
1 {file_location_id=1 parent_frame_id=1}


%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%step_of_three (p: s32[]) -> s32[] {
  %p = s32[] parameter(0)
  %three = s32[] constant(3)
  ROOT %next = s32[] add(%p, %three)
}

%product (l: f32[8,16], r: f32[16,16]) -> f32[8,16] {
  %l = f32[8,16]{1,0} parameter(0)
  %r = f32[16,16]{1,0} parameter(1)
  ROOT %dot.1 = f32[8,16]{1,0} dot(%l, %r), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%inner_body (state: (s32[], f32[8,16], f32[16,16], s32[])) -> (s32[], f32[8,16], f32[16,16],
      s32[]) {
  %state = (s32[], f32[8,16]{1,0}, f32[16,16]{1,0}, /*index=3*/s32[]) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %x = f32[8,16]{1,0} get-tuple-element(%state), index=1
  %w = f32[16,16]{1,0} get-tuple-element(%state), index=2
  %limit = s32[] get-tuple-element(%state), index=3
  %i_next = s32[] fusion(%i), kind=kLoop, calls=%step_of_three
  %y = f32[8,16]{1,0} fusion(%x, %w), kind=kOutput, calls=%product,
      metadata={op_name="jit(f)/calls={1}"}
  ROOT %out = (s32[], f32[8,16]{1,0}, f32[16,16]{1,0}, s32[]) tuple(%i_next, %y, %w, %limit)
}

%inner_condition (state.1: (s32[], f32[8,16], f32[16,16], s32[])) -> pred[] {
  %state.1 = (s32[], f32[8,16]{1,0}, f32[16,16]{1,0}, s32[]) parameter(0)
  %i.1 = s32[] get-tuple-element(%state.1), index=0
  %limit.1 = s32[] get-tuple-element(%state.1), index=3
  ROOT %more = pred[] compare(%i.1, %limit.1), direction=LT
}

%outer_body (state.2: (s32[], f32[8,16], f32[16,16], s32[])) -> (s32[], f32[8,16], f32[16,16],
      s32[]) {
  %state.2 = (s32[], f32[8,16]{1,0}, f32[16,16]{1,0}, s32[]) parameter(0)
  %n = s32[] get-tuple-element(%state.2), index=0
  %x.2 = f32[8,16]{1,0} get-tuple-element(%state.2), index=1
  %w.2 = f32[16,16]{1,0} get-tuple-element(%state.2), index=2
  %limit.2 = s32[] get-tuple-element(%state.2), index=3
  %two = s32[] constant(2)
  %first = s32[] copy(%two)
  %start = (s32[], f32[8,16]{1,0}, f32[16,16]{1,0}, s32[]) tuple(%first, %x.2, %w.2, %limit.2)
  %inner = (s32[], f32[8,16]{1,0}, f32[16,16]{1,0}, s32[]) while(%start),
      condition=%inner_condition, body=%inner_body
  %y.2 = f32[8,16]{1,0} get-tuple-element(%inner), index=1
  %one = s32[] constant(1)
  %n_next = s32[] add(%n, %one)
  ROOT %out.2 = (s32[], f32[8,16]{1,0}, f32[16,16]{1,0}, s32[]) tuple(%n_next, %y.2, %w.2, %limit.2)
}

%outer_condition (state.3: (s32[], f32[8,16], f32[16,16], s32[])) -> pred[] {
  %state.3 = (s32[], f32[8,16]{1,0}, f32[16,16]{1,0}, s32[]) parameter(0)
  %n.3 = s32[] get-tuple-element(%state.3), index=0
  %x.3 = f32[8,16]{1,0} get-tuple-element(%state.3), index=1
  %always = pred[] custom-call(%x.3), custom_call_target="Unreadable"
  ROOT %go_on = pred[] copy(%always)
}

ENTRY %main (x.4: f32[8,16], w.4: f32[16,16]) -> f32[] {
  %x.4 = f32[8,16]{1,0} parameter(0), metadata={op_name="x"}
  %w.4 = f32[16,16]{1,0} parameter(1), metadata={op_name="w"}
  %zero = s32[] constant(0)
  %twelve = s32[] constant(12)
  %start.4 = (s32[], f32[8,16]{1,0}, f32[16,16]{1,0}, s32[]) tuple(%zero, %x.4, %w.4, %twelve)
  %outer = (s32[], f32[8,16]{1,0}, f32[16,16]{1,0}, s32[]) while(%start.4),
      condition=%outer_condition, body=%outer_body, metadata={op_name="jit(f)/while"
      stack_frame_id=1},
      backend_config={"known_trip_count":{"n":"3"},"known_init_step":{"init":"0","step":"1"}}
  %y.4 = f32[8,16]{1,0} get-tuple-element(%outer), index=1
  %nil = f32[] constant(0)
  ROOT %total = f32[] reduce(%y.4, %nil), dimensions={0,1}, to_apply=%add
}
""")
UNREADABLE = NESTED.replace('"known_trip_count":{"n":"3"},', "")

# As libtpu 0.0.42 writes them, shortened: an all-gather that runs beside two fusions (each
# holds a copy of it), a reduce-scatter as a fused all-reduce, a permutation in two halves,
# and a Pallas kernel whose metadata spans lines. 4 devices.
TPU = hlo("""\
HloModule jit_step, is_scheduled=true, num_partitions=4,
      frontend_attributes={arg_layout_modes="default"}

%add (a: bf16[], b: bf16[]) -> bf16[] {
  %a = bf16[]{:T(256)} parameter(0)
  %b = bf16[]{:T(256)} parameter(1)
  ROOT %sum = bf16[]{:T(256)} add(%a, %b)
}

%begin (p: bf16[256,128]) -> (bf16[256,128], bf16[512,128], u32[]) {
  %p = bf16[256,128]{1,0:T(8,128)(2,1)S(1)} parameter(0)
  %all-gather.1 = bf16[512,128]{1,0:T(8,128)(2,1)} all-gather(%p), channel_id=7,
      replica_groups={{0,1},{2,3}}, dimensions={0}, use_global_device_ids=true,
      frontend_attributes={chain_id="0"},
      backend_config={"async_collective_fusion_config":{"flag_start":"-1","flag_end":"-1"}}
  ROOT %custom-call.1 = (bf16[256,128]{1,0:T(8,128)(2,1)S(1)}, bf16[512,128]{1,0:T(8,128)(2,1)},
      u32[]{:S(2)}) custom-call(%all-gather.1), custom_call_target="AsyncCollectiveStart"
}

%beside (q: bf16[256,128], r: bf16[64,128], s: bf16[128,128]) -> bf16[64,128] {
  %q = bf16[256,128]{1,0:T(8,128)(2,1)S(1)} parameter(0)
  %r = bf16[64,128]{1,0:T(8,128)(2,1)} parameter(1)
  %s = bf16[128,128]{1,0:T(8,128)(2,1)} parameter(2)
  %all-gather.2 = bf16[512,128]{1,0:T(8,128)(2,1)} all-gather(%q), channel_id=7,
      replica_groups={{0,1},{2,3}}, dimensions={0}, use_global_device_ids=true,
      frontend_attributes={chain_id="0"},
      backend_config={"async_collective_fusion_config":{"flag_start":"2","flag_end":"8"}}
  ROOT %convolution.1 = bf16[64,128]{1,0:T(8,128)(2,1)} convolution(%r, %s), dim_labels=bf_io->bf,
      backend_config={"window_config":{"estimated_cycles":"500"}}
}

%end (t: bf16[256,128]) -> bf16[512,128] {
  %t = bf16[256,128]{1,0:T(8,128)(2,1)S(1)} parameter(0)
  %all-gather.3 = bf16[512,128]{1,0:T(8,128)(2,1)} all-gather(%t), channel_id=7,
      replica_groups={{0,1},{2,3}}, dimensions={0}, use_global_device_ids=true,
      frontend_attributes={chain_id="0"},
      backend_config={"async_collective_fusion_config":{"flag_start":"2","flag_end":"8"}}
  ROOT %custom-call.3 = bf16[512,128]{1,0:T(8,128)(2,1)} custom-call(%t, %all-gather.3),
      custom_call_target="AsyncCollectiveDone"
}

%all-reduce-scatter.2.clone.1 (input: bf16[64,128]) -> bf16[32,128] {
  %input = bf16[64,128]{1,0:T(8,128)(2,1)} parameter(0)
  %all-reduce.1 = bf16[64,128]{1,0:T(8,128)(2,1)} all-reduce(%input), channel_id=9,
      replica_groups=[2,2]<=[2,2]T(1,0), use_global_device_ids=true, to_apply=%add
  %device = u32[] partition-id()
  %table = u32[4]{0:T(128)} constant({0, 32, 0, 32})
  %place.1 = u32[1]{0:T(128)} dynamic-slice(%table, %device), dynamic_slice_sizes={1}
  %place = u32[] bitcast(%place.1)
  ROOT %slice = bf16[32,128]{1,0:T(8,128)(2,1)} dynamic-slice(%all-reduce.1, %place, %place),
      dynamic_slice_sizes={32,128}
}

%body (state: (s32[], bf16[256,128], bf16[64,128], bf16[128,128])) -> (s32[], bf16[256,128],
      bf16[64,128], bf16[128,128]) {
  %state = (s32[]{:T(128)}, bf16[256,128]{1,0:T(8,128)(2,1)S(1)},
      bf16[64,128]{1,0:T(8,128)(2,1)}, bf16[128,128]{1,0:T(8,128)(2,1)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%state), index=0
  %w = bf16[256,128]{1,0:T(8,128)(2,1)S(1)} get-tuple-element(%state), index=1
  %x = bf16[64,128]{1,0:T(8,128)(2,1)} get-tuple-element(%state), index=2
  %v = bf16[128,128]{1,0:T(8,128)(2,1)} get-tuple-element(%state), index=3
  %fusion.1 = (bf16[256,128]{1,0:T(8,128)(2,1)S(1)}, bf16[512,128]{1,0:T(8,128)(2,1)},
      u32[]{:S(2)}) fusion(%w), kind=kCustom, calls=%begin
  %fusion.2 = bf16[64,128]{1,0:T(8,128)(2,1)} fusion(%w, %x, %v), kind=kCustom, calls=%beside,
      backend_config={"window_config":{"estimated_cycles":"1000"}}
  %fusion.3 = bf16[64,128]{1,0:T(8,128)(2,1)} fusion(%w, %fusion.2, %v), kind=kCustom,
      calls=%beside, backend_config={"window_config":{"estimated_cycles":"1000"}}
  %fusion.4 = bf16[512,128]{1,0:T(8,128)(2,1)} fusion(%w), kind=kCustom, calls=%end
  %fusion.5 = bf16[32,128]{1,0:T(8,128)(2,1)} fusion(%fusion.3), kind=kCustom,
      calls=%all-reduce-scatter.2.clone.1
  %collective-permute-start = (bf16[32,128]{1,0:T(8,128)(2,1)}, bf16[32,128]{1,0:T(8,128)(2,1)},
      u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(%fusion.5), channel_id=1,
      source_target_pairs={{0,2},{2,0},{1,3},{3,1}}
  %collective-permute-done = bf16[32,128]{1,0:T(8,128)(2,1)}
      collective-permute-done(%collective-permute-start)
  %kernel = bf16[64,128]{1,0:T(8,128)(2,1)} custom-call(%collective-permute-done),
      custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={
"a":"b",
"c":"d{"
}}, metadata={op_name="jit(f)/pallas_call" stack_frame_id=2},
      backend_config={"custom_call_config":{"body":"TUzv"}}
  %one = s32[]{:T(128)} constant(1)
  %i_next = s32[]{:T(128)} add(%i, %one), backend_config={"window_config":{"estimated_cycles":"7"}}
  ROOT %out = (s32[]{:T(128)}, bf16[256,128]{1,0:T(8,128)(2,1)S(1)},
      bf16[64,128]{1,0:T(8,128)(2,1)}, bf16[128,128]{1,0:T(8,128)(2,1)}) tuple(%i_next, %w,
      %kernel, %v)
}

%condition (state.1: (s32[], bf16[256,128], bf16[64,128], bf16[128,128])) -> pred[] {
  %six = s32[]{:T(128)} constant(6)
  %state.1 = (s32[]{:T(128)}, bf16[256,128]{1,0:T(8,128)(2,1)S(1)},
      bf16[64,128]{1,0:T(8,128)(2,1)}, bf16[128,128]{1,0:T(8,128)(2,1)}) parameter(0)
  %i.1 = s32[]{:T(128)} get-tuple-element(%state.1), index=0
  ROOT %more = pred[]{:T(512)} compare(%i.1, %six), direction=LT
}

ENTRY %main (w.2: bf16[256,128], x.2: bf16[64,128], v.2: bf16[128,128]) -> bf16[64,128] {
  %w.2 = bf16[256,128]{1,0:T(8,128)(2,1)S(1)} parameter(0), sharding={devices=[2,1,2]<=[4]
      last_tile_dim_replicate}
  %x.2 = bf16[64,128]{1,0:T(8,128)(2,1)} parameter(1), sharding={replicated}
  %v.2 = bf16[128,128]{1,0:T(8,128)(2,1)} parameter(2), sharding={replicated}
  %zero = s32[]{:T(128)} constant(0)
  %tuple = (s32[]{:T(128)}, bf16[256,128]{1,0:T(8,128)(2,1)S(1)},
      bf16[64,128]{1,0:T(8,128)(2,1)}, bf16[128,128]{1,0:T(8,128)(2,1)}) tuple(%zero, %w.2,
      %x.2, %v.2)
  %while = (s32[]{:T(128)}, bf16[256,128]{1,0:T(8,128)(2,1)S(1)},
      bf16[64,128]{1,0:T(8,128)(2,1)}, bf16[128,128]{1,0:T(8,128)(2,1)}) while(%tuple),
      condition=%condition, body=%body
  ROOT %y = bf16[64,128]{1,0:T(8,128)(2,1)} get-tuple-element(%while), index=2
}
""")


def one_instruction(line: str, parameters: str = "f32[4,8]", num_partitions: int = 8):
    """A module whose entry holds one instruction, of the operand %p."""
    return modules.read(
        f"HloModule m, num_partitions={num_partitions}\n\n"
        f"ENTRY %main (p: {parameters}) -> f32[] {{\n"
        f"  %p = {parameters} parameter(0)\n  {line}\n}}\n"
    )


# --- groups of devices ---


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.data())
def test_iota_groups_are_those_of_numpy(shape, data):
    permutation = data.draw(st.permutations(range(len(shape))))
    num_devices = int(np.prod(shape))
    size = data.draw(st.sampled_from([n for n in range(1, num_devices + 1) if not num_devices % n]))
    wanted = np.arange(num_devices).reshape(shape).transpose(permutation).reshape(-1, size)
    written = ",".join(map(str, shape))
    order = "" if permutation == sorted(permutation) else f"T({','.join(map(str, permutation))})"
    groups = modules.groups_of(f"[{num_devices // size},{size}]<=[{written}]{order}")
    assert [list(group) for group in groups] == wanted.tolist()


@given(st.permutations(range(3)), st.integers(0, 3), st.booleans())
def test_groups_by_mesh_axes_are_those_of_numpy(order, num_axes, shuffled):
    sizes, names = (2, 3, 4), ("data", "fsdp", "tensor")
    devices = np.random.default_rng(0).permutation(24) if shuffled else np.arange(24)
    inside, outside = list(order[:num_axes]), sorted(order[num_axes:])
    wanted = devices.reshape(sizes).transpose(outside + inside)
    wanted = wanted.reshape(-1, int(np.prod([sizes[axis] for axis in inside])))
    mesh = ",".join(f"'{name}'={size}" for name, size in zip(names, sizes, strict=True))
    ids = f", device_ids=({','.join(map(str, devices))})" if shuffled else ""
    axes = ",".join(f"'{names[axis]}'" for axis in inside)
    groups = modules.groups_of(f"mesh[{mesh}]{ids} {{{axes}}}")
    assert [list(group) for group in groups] == wanted.tolist()


def test_groups_by_mesh_axes_may_take_a_factor_of_an_axis():
    # Axis b of 8 as 2 x 2 x 2, of which the middle factor is meant.
    wanted = np.arange(16).reshape(2, 2, 2, 2).transpose(0, 1, 3, 2).reshape(-1, 2)
    groups = modules.groups_of("mesh['a'=2,'b'=8] {'b':(2)2}")
    assert [list(group) for group in groups] == wanted.tolist()
    # Devices laid out as the transpose of a 4 by 2 array.
    groups = modules.groups_of("mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}")
    assert [list(group) for group in groups] == np.arange(8).reshape(4, 2).T.tolist()


MESH = {"data": 2, "fsdp": 2, "tensor": 2}


@pytest.mark.parametrize(
    ("groups", "axes", "size"),
    [
        ("{{0,1},{2,3},{4,5},{6,7}}", ("tensor",), 2),
        ("{{0,2},{1,3},{4,6},{5,7}}", ("fsdp",), 2),
        ("{{0,4},{1,5},{2,6},{3,7}}", ("data",), 2),
        ("[2,4]<=[8]", ("fsdp", "tensor"), 4),
        ("[2,4]<=[4,2]T(1,0)", ("data", "fsdp"), 4),
        ("[2,4]<=[2,2,2]T(1,0,2)", ("data", "tensor"), 4),
        ("mesh['data'=2,'fsdp'=2,'tensor'=2] {'data'}", ("data",), 2),
        ("{}", ("data", "fsdp", "tensor"), 8),
        ("{{0},{1},{2},{3},{4},{5},{6},{7}}", (), 1),
    ],
)
def test_axes_of_a_collective_are_those_whose_coordinates_vary(groups, axes, size):
    module = one_instruction(
        f"ROOT %r = f32[4,8] all-reduce(%p), channel_id=1, replica_groups={groups}, "
        "use_global_device_ids=true, to_apply=%add"
    )
    (collective,) = module.collectives(MESH)
    assert (collective.axes, collective.group_size) == (axes, size)
    assert module.collectives()[0].axes is None


def test_mesh_of_another_size_is_refused():
    module = one_instruction("ROOT %r = f32[4,8] all-reduce(%p), replica_groups={}, to_apply=%add")
    with pytest.raises(WrongInput, match=r"'fsdp': 2\} has 4 devices.*compiled for 8"):
        module.collectives({"data": 2, "fsdp": 2})


def test_groups_written_in_an_unknown_way_are_not_taken_for_all_devices():
    module = one_instruction("ROOT %r = f32[4,8] all-gather(%p), replica_groups=<0..3>")
    with pytest.raises(CannotDo, match=r"replica_groups of r.*<0\.\.3>"):
        module.collectives(MESH)


# --- bytes ---


@pytest.mark.parametrize(
    ("written", "operand", "sent"),
    [
        # f32[4,8] is 128 bytes; groups of 4.
        ("f32[16,8] all-gather(%p), replica_groups=[2,4]<=[8], dimensions={0}", 128, 3 * 128),
        ("f32[4,8] all-reduce(%p), replica_groups=[2,4]<=[8], to_apply=%add", 128, 192),
        ("f32[1,8] reduce-scatter(%p), replica_groups=[2,4]<=[8], to_apply=%add", 128, 96),
        ("f32[4,8] all-to-all(%p), replica_groups=[2,4]<=[8], dimensions={0}", 128, 96),
        ("f32[4,8] collective-permute(%p), source_target_pairs={{0,1},{1,0}}", 128, 128),
        ("f32[4,8] collective-permute(%p), source_target_pairs={{0,0},{1,1}}", 128, 0),
        ("f32[4,8] collective-broadcast(%p), replica_groups=[2,4]<=[8]", 128, 128),
        # Started: the result's type repeats the operand, but it travels once.
        ("(f32[4,8], f32[16,8]) all-gather-start(%p), replica_groups=[2,4]<=[8]", 128, 384),
        ("f32[4,8] all-reduce-start(%p), replica_groups=[2,4]<=[8], to_apply=%add", 128, 192),
        # The other operands are where to write and how much.
        ("f32[4,8] ragged-all-to-all(%p, %p, %p, %p), replica_groups=[2,4]<=[8]", 128, 128),
        # Two operands, as XLA combines them.
        ("(f32[4,8], f32[4,8]) all-reduce(%p, %p), replica_groups=[2,4]<=[8]", 256, 384),
        # A slice f32[2,8] of the operand.
        (
            "(f32[4,8], f32[4,8]) collective-permute-start(%p, %p, %p, %p), "
            "source_target_pairs={{0,1}}, slice_sizes={{2,8}}",
            64,
            64,
        ),
    ],
)
def test_bytes_follow_the_formula_of_each_kind(written, operand, sent):
    (collective,) = one_instruction(f"ROOT %r = {written}").collectives()
    assert (collective.count, collective.operand_bytes) == (1, operand)
    assert collective.sent_bytes == sent
    assert written.split("(%p")[0].endswith((collective.kind, f"{collective.kind}-start"))


def test_permutations_group_what_their_pairs_connect():
    module = one_instruction(
        "ROOT %r = f32[4,8] collective-permute(%p), "
        "source_target_pairs={{0,2},{2,4},{4,6},{6,0},{1,3},{3,5},{5,7},{7,1}}"
    )
    (collective,) = module.collectives(MESH)
    assert (collective.axes, collective.group_size) == (("data", "fsdp"), 4)
    # A chain whose parts meet last.
    module = one_instruction(
        "ROOT %r = f32[4,8] collective-permute(%p), channel_id=5, "
        "source_target_pairs={{0,1},{2,3},{1,2},{4,0}}"
    )
    (collective,) = module.collectives(MESH)
    assert (collective.axes, collective.group_size) == (("data", "fsdp", "tensor"), 5)
    instruction = module.computations["main"].root
    assert instruction.source_target_pairs == ((0, 1), (2, 3), (1, 2), (4, 0))
    assert (instruction.channel, instruction.replica_groups) == (5, None)


@pytest.mark.parametrize(
    ("shape", "num_bytes"),
    [
        (modules.Shape("bf16", (3, 5)), 30),
        (modules.Shape("f32", ()), 4),
        (modules.Shape("pred", (7,)), 7),
        (modules.Shape("s4", (7,)), 4),
        (modules.Shape("f8e4m3fn", (2, 2)), 4),
        (modules.Shape("c64", (2,)), 16),
        (modules.Shape("token", ()), 0),
    ],
)
def test_bytes_of_arrays(shape, num_bytes):
    assert shape.num_bytes == num_bytes


def test_unknown_element_type_is_named():
    with pytest.raises(CannotDo, match="element type f3e1m1 "):
        _ = modules.Shape("f3e1m1", (2,)).num_bytes


# --- reading and counting ---


def test_counts_multiply_nested_loops_and_count_conditions_once_more():
    module = modules.read(NESTED)
    assert {loop.name: loop.trips for loop in module.loops} == {"inner": 4, "outer": 3}
    counts, executed = module.operation_counts(), module.executed_counts()
    assert (counts["dot"], executed["dot"]) == (1, 3 * 4)
    # Adds stand in `add`, `step_of_three` and `outer_body`; the first is applied to elements.
    assert (counts["add"], executed["add"]) == (3, 3 * 4 + 3)
    assert (counts["compare"], executed["compare"]) == (1, 3 * 5)
    assert executed["custom-call"] == 4
    assert (executed["while"], executed["reduce"]) == (1 + 3, 1)
    assert module.contractions() == {Contraction("dot", "f32[8,16]"): 12}
    assert module.contractions(executed=False) == {Contraction("dot", "f32[8,16]"): 1}
    assert module.estimated_cycles() is None
    assert module.collectives({"data": 1}) == []


def test_unknown_trip_count_is_reported_and_never_taken_as_one():
    module = modules.read(UNREADABLE)
    assert {loop.name: loop.trips for loop in module.loops} == {"inner": 4, "outer": None}
    assert module.operation_counts()["dot"] == 1  # needs no trip counts
    for count in (
        module.executed_counts,
        module.contractions,
        module.collectives,
        module.estimated_cycles,
    ):
        with pytest.raises(CannotDo, match=r"loop outer \(jit\(f\)/while\).*unknown_trips"):
            count()
    given_a_number = modules.read(UNREADABLE, unknown_trips=10)
    assert given_a_number.executed_counts()["dot"] == 10 * 4
    assert given_a_number.loops == module.loops  # still reported as unknown


def counting_loop(
    first: int, limit: int, direction: str = "LT", step: str = "add(%i, %one)", **changes: str
) -> str:
    """A loop over (i, limit) that goes on while i < limit, or as told. Constants: one, three."""
    lines = {
        "next": f"s32[] {step}",
        "left_out": "s32[] copy(%limit)",
        "compared": "%i.1, %limit.1",
        **changes,
    }
    return f"""HloModule m

%body (s: (s32[], s32[])) -> (s32[], s32[]) {{
  %s = (s32[], s32[]) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %limit = s32[] get-tuple-element(%s), index=1
  %one = s32[] constant(1)
  %three = s32[] constant(3)
  %ahead = s32[] add(%i, %three)
  %next = {lines["next"]}
  %after = {lines["left_out"]}
  ROOT %t = (s32[], s32[]) tuple(%next, %after)
}}

%condition (s.1: (s32[], s32[])) -> pred[] {{
  %s.1 = (s32[], s32[]) parameter(0)
  %i.1 = s32[] get-tuple-element(%s.1), index=0
  %limit.1 = s32[] get-tuple-element(%s.1), index=1
  %five = s32[] constant(5)
  %later = s32[] add(%i.1, %five)
  ROOT %c = pred[] compare({lines["compared"]}), direction={direction}
}}

ENTRY %main () -> (s32[], s32[]) {{
  %first = s32[] constant({first})
  %last = s32[] constant({limit})
  %t.2 = (s32[], s32[]) tuple(%first, %last)
  ROOT %loop = (s32[], s32[]) while(%t.2), condition=%condition, body=%body
}}
"""


COUNTING = {
    "add(%i, %one)": 1,
    "add(%three, %i)": 3,
    "subtract(%i, %one)": -1,
    "subtract(%i, %three)": -3,
}


@example(0, 7, "NE", "add(%three, %i)")  # steps over it
@given(
    st.integers(-9, 9),
    st.integers(-9, 9),
    st.sampled_from(["LT", "LE", "GT", "GE", "NE"]),
    st.sampled_from(sorted(COUNTING)),
)
def test_trip_counts_are_those_of_the_loop_run_by_hand(first, limit, direction, step):
    i, trips = first, 0
    while getattr(operator, direction.lower())(i, limit) and trips < 100:
        i, trips = i + COUNTING[step], trips + 1
    wanted = None if trips == 100 else trips
    assert modules.read(counting_loop(first, limit, direction, step)).loops[0].trips == wanted
    mirror = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE", "NE": "NE"}[direction]
    mirrored = counting_loop(first, limit, mirror, step, compared="%limit.1, %i.1")
    assert modules.read(mirrored).loops[0].trips == wanted


def test_trip_count_of_a_compared_sum():
    # i + 5 < 9 with i = 0, 1, 2, 3.
    assert modules.read(counting_loop(0, 9, compared="%later, %limit.1")).loops[0].trips == 4


@pytest.mark.parametrize(
    "changes",
    [
        {"left_out": "s32[] add(%limit, %one)"},  # the limit moves as well
        {"next": "s32[] multiply(%i, %three)"},
        {"next": "s32[] add(%i, %limit)"},
        {"next": "s32[] add(%i, %ahead)"},
        {"next": "s32[] add(%three, %one)"},
        {"next": "s32[] subtract(%one, %i)"},
        {"next": "s32[] subtract(%i, %ahead)", "direction": "GE"},
        {"next": "s32[] copy(%i)"},  # stands still
        {"compared": "%i.1, %i.1"},
    ],
)
def test_trip_count_of_another_loop_is_unknown(changes):
    assert modules.read(counting_loop(0, 9, **changes)).loops[0].trips is None


def test_limit_that_an_enclosing_loop_changes_is_unknown():
    moving = NESTED.replace("%y.2, %w.2, %limit.2)", "%y.2, %w.2, %n_next)")
    assert moving != NESTED
    assert {loop.name: loop.trips for loop in modules.read(moving).loops}["inner"] is None


@pytest.mark.parametrize(
    "branches",
    ["branch_computations={%yes, %no}", "true_computation=%yes, false_computation=%no"],
)
def test_each_branch_of_a_conditional_counts_as_taken(branches):
    module = modules.read(
        f"""HloModule m

%yes (a: f32[4]) -> f32[4] {{
  %a = f32[4] parameter(0)
  ROOT %sine = f32[4] sine(%a)
}}

%no (b: f32[4]) -> f32[4] {{
  %b = f32[4] parameter(0)
  ROOT %cosine = f32[4] cosine(%b)
}}

ENTRY %main (p: pred[], x: f32[4]) -> f32[4] {{
  %p = pred[] parameter(0)
  %x = f32[4] parameter(1)
  ROOT %r = f32[4] conditional(%p, %x, %x), {branches}
}}
"""
    )
    assert module.executed_counts() == {"parameter": 4, "sine": 1, "cosine": 1, "conditional": 1}


def test_collective_beside_fusions_counts_once_a_round():
    module = modules.read(TPU)
    assert [loop.trips for loop in module.loops] == [6]
    assert module.operation_counts()["all-gather"] == 3  # copies of one
    gather, scatter, permute = 256 * 128 * 2, 64 * 128 * 2, 32 * 128 * 2  # bytes
    assert module.traffic({"data": 2, "fsdp": 2}) == {
        ("all-gather", ("fsdp",)): Traffic(6, 6 * gather, 6 * gather),
        ("reduce-scatter", ("data",)): Traffic(6, 6 * scatter, 6 * scatter // 2),
        ("collective-permute", ("data",)): Traffic(6, 6 * permute, 6 * permute),
    }


def test_kernels_and_estimates_of_the_tpu_compiler_are_read():
    module = modules.read(TPU)
    # Not the convolution's, which the fusion around it includes.
    assert module.estimated_cycles() == 6 * (1000 + 1000 + 7)
    unknown = modules.read(
        TPU.replace('"estimated_cycles":"7"', f'"estimated_cycles":"{2**63 - 1}"')
    )
    assert unknown.estimated_cycles() == 6 * (1000 + 1000)
    assert module.contractions() == {
        Contraction("convolution", "bf16[64,128]"): 12,
        Contraction("tpu_custom_call", "bf16[64,128]"): 6,
    }
    kernel = module.computations["body"].instructions["kernel"]
    assert kernel.op_name == "jit(f)/pallas_call"
    assert '"c":"d{"' in kernel.attributes


def test_asynchronous_collective_written_in_an_unknown_way_is_refused():
    with pytest.raises(CannotDo, match="all-gather of chain 0 without an AsyncCollectiveStart"):
        modules.read(TPU.replace("AsyncCollectiveStart", "SomethingElse")).collectives()


def test_collective_in_an_asynchronous_computation_counts_once():
    module = modules.read("""HloModule m, num_partitions=2
%wrapped (q: f32[8]) -> f32[8] {
  %q = f32[8]{0} parameter(0)
  ROOT %exchange = f32[8]{0} all-to-all(%q), channel_id=1, replica_groups={{0,1}}, dimensions={0}
}, execution_thread="other"

ENTRY %main (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  %start = ((f32[8]{0}), f32[8]{0}, u32[]) all-to-all-start(%p), calls=%wrapped
  ROOT %done = f32[8]{0} all-to-all-done(%start), calls=%wrapped
}
""")
    (collective,) = module.collectives({"data": 2})
    assert (collective.name, collective.count, collective.sent_bytes) == ("exchange", 1, 16)


def test_names_may_lack_percent_signs_and_operands_have_types():
    plain = modules.read(NESTED.replace("%", ""))
    assert plain.executed_counts() == modules.read(NESTED).executed_counts()
    typed = NESTED.replace("dot(%l, %r)", "dot(f32[8,16]{1,0:T(8,128)} %l, f32[16,16]{1,0} %r)")
    product = modules.read(typed).computations["product"].root
    assert product.operands == ("l", "r")


@pytest.mark.parametrize("text", ["", "module @jit_f {\n}\n"])
def test_other_text_is_refused(text):
    with pytest.raises(WrongInput, match="not the text of an HLO module"):
        modules.read(text)


def test_text_that_is_cut_off_is_refused():
    with pytest.raises(WrongInput, match="cut off"):
        modules.read(NESTED[: NESTED.index("ENTRY")])
    with pytest.raises(WrongInput, match="cut off"):
        modules.read(NESTED[: NESTED.rindex("}")])
    with pytest.raises(WrongInput, match=r"cannot be read.*%nonsense"):
        modules.read(NESTED.replace("%zero =", "%nonsense"))


# --- text against text ---


def test_places_are_taken_out_and_nothing_else():
    moved = NESTED.replace("/somewhere/a.py", "/elsewhere/b.py").replace('"x"', '"y{[0]}"')
    assert moved != NESTED
    bare = modules.without_places(NESTED)
    assert modules.without_places(moved) == bare
    assert modules.read(bare).executed_counts() == modules.read(NESTED).executed_counts()
    removed = collections.Counter(NESTED.split()) - collections.Counter(bare.split())
    assert "dot(%l," not in removed
    assert 'backend_config={"known_trip_count":{"n":"3"},"known_init_step":' in bare
    assert modules.without_places(NESTED.replace("dot(%l, %r)", "dot(%r, %l)")) != bare


def test_text_without_devices_keeps_what_each_device_does():
    other = (
        TPU.replace("num_partitions=4", "num_partitions=8")
        .replace("{{0,1},{2,3}}", "[4,2]<=[8]")
        .replace("[2,2]<=[2,2]T(1,0)", "mesh['data'=4,'fsdp'=2] {'data'}")
        .replace("{{0,2},{2,0},{1,3},{3,1}}", "{{0,2},{2,4},{4,6},{6,0}}")
        .replace("channel_id=7", "channel_id=12")
        .replace("devices=[2,1,2]<=[4]", "devices=[4,1,2]<=[8]")
        .replace("u32[4]{0:T(128)} constant({0, 32, 0, 32})", "u32[8]{0:T(256)} constant({...})")
    )
    same = modules.without_devices(TPU)
    assert modules.without_devices(other) == same
    assert "replica_groups" not in same
    assert modules.without_devices(other.replace("direction=LT", "direction=LE")) != same
    assert modules.without_devices(other.replace("[32,128]", "[16,128]")) != same


# --- compiled on emulated devices ---


def compiled_text(function, mesh_shape: dict[str, int], in_specs, out_specs, *shapes) -> str:
    devices = jax.devices()[: int(np.prod(list(mesh_shape.values())))]
    mesh = jax.make_mesh(
        tuple(mesh_shape.values()),
        tuple(mesh_shape),
        axis_types=(jax.sharding.AxisType.Auto,) * len(mesh_shape),
        devices=devices,
    )
    mapped = jax.shard_map(
        function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return jax.jit(mapped).lower(*arguments).compile().as_text()


def without_known_trips(text: str) -> str:
    return re.sub(r'"known_trip_count":\{"n":"\d+"\}', '"unsaid":0', text)


def layers_with_every_collective(x_BD, w_NDD):
    """Five layers, three times over. On each device x f32[8,16], w f32[5,4,16]."""

    def layer(x_BD, w_shard_DD):
        w_DD = jax.lax.all_gather(w_shard_DD, "fsdp", axis=0, tiled=True)
        y_BD = jnp.tanh(x_BD @ w_DD)
        part = jax.lax.psum_scatter(y_BD, "fsdp", scatter_dimension=0, tiled=True)
        y_BD = jax.lax.all_to_all(y_BD, "data", split_axis=0, concat_axis=1, tiled=True)
        y_BD = jax.lax.ppermute(y_BD, "fsdp", [(0, 1), (1, 2), (2, 3), (3, 0)])
        return y_BD.reshape(8, 16) + jnp.tile(part, (4, 1)), None

    def pass_(x_BD, _):
        x_BD, _ = jax.lax.scan(layer, x_BD, w_NDD)
        return x_BD / jax.lax.psum(jnp.sum(x_BD * x_BD), ("data", "fsdp")), None

    return jax.lax.scan(pass_, x_BD, length=3)[0]


@pytest.fixture(scope="module")
def every_collective() -> str:
    specs = (P(("data", "fsdp")), P(None, "fsdp"))
    text = compiled_text(
        layers_with_every_collective,
        {"data": 2, "fsdp": 4},
        specs,
        specs[0],
        (64, 16),
        (5, 16, 16),
    )
    assert isinstance(text, str)
    return text


def test_collectives_of_a_compiled_program_are_those_written(every_collective):
    module = modules.read(every_collective)
    assert sorted(loop.trips for loop in module.loops) == [3, 5]
    x, w = 8 * 16 * 4, 4 * 16 * 4  # bytes on a device
    assert module.traffic({"data": 2, "fsdp": 4}) == {
        ("all-gather", ("fsdp",)): Traffic(15, 15 * w, 15 * 3 * w),
        ("reduce-scatter", ("fsdp",)): Traffic(15, 15 * x, 15 * x * 3 // 4),
        ("all-to-all", ("data",)): Traffic(15, 15 * x, 15 * x // 2),
        ("collective-permute", ("fsdp",)): Traffic(15, 15 * x, 15 * x),
        ("all-reduce", ("data", "fsdp")): Traffic(3, 3 * 4, 3 * 7),
    }
    assert module.contractions() == {Contraction("dot", "f32[8,16]"): 15}
    names = {c.kind: c.op_name for c in module.collectives()}
    assert names["all-to-all"].startswith("jit(layers_with_every_collective)/shard_map/while/")


def test_trip_counts_are_found_without_the_compilers_word(every_collective):
    text = without_known_trips(every_collective)
    assert text != every_collective
    assert modules.read(text).loops == modules.read(every_collective).loops
    assert all(loop.trips for loop in modules.read(text).loops)


@pytest.mark.parametrize(("remat", "products_a_layer"), [(False, 3), (True, 4)])
def test_rematerialised_products_are_counted(remat, products_a_layer):
    """Forward, and for each of two gradients one; with remat the forward product again."""

    def loss(w_NDD, x_BD):
        def layer(x_BD, w_DD):
            return jnp.tanh(x_BD @ w_DD), None

        body = jax.checkpoint(layer) if remat else layer
        return jnp.sum(jax.lax.scan(body, x_BD, w_NDD)[0])

    arguments = (jnp.zeros((6, 16, 16)), jnp.zeros((8, 16)))
    text = jax.jit(jax.grad(loss)).lower(*arguments).compile().as_text()
    contractions = modules.read(text).contractions()
    assert sum(contractions.values()) == 6 * products_a_layer
    assert contractions[Contraction("dot", "f32[16,16]")] == 6  # gradients of w


def test_same_program_on_more_devices_has_the_same_text_without_devices():
    def text(mesh_shape, width=16):
        def step(x_BD, w_DD):
            gradient = jax.grad(lambda w_DD: jnp.sum(jnp.tanh(x_BD @ w_DD)))(w_DD)
            return w_DD - jax.lax.psum(gradient, "data")

        rows = 8 * mesh_shape["data"]
        shapes = ((rows, width), (width, width))
        return compiled_text(step, mesh_shape, (P("data"), P()), P(), *shapes)

    two, eight = text({"data": 2}), text({"data": 8})
    assert modules.without_places(two) != modules.without_places(eight)
    assert modules.without_devices(two) == modules.without_devices(eight)
    assert modules.without_devices(two) != modules.without_devices(text({"data": 2}, width=32))


def test_loop_that_ends_on_a_value_is_reported():
    def halve(x):
        return jax.lax.while_loop(lambda x: jnp.sum(x) > 1, lambda x: x * 0.5, x)

    text = jax.jit(halve).lower(jnp.ones(8)).compile().as_text()
    (loop,) = modules.read(text).loops
    assert loop.trips is None
    with pytest.raises(CannotDo, match="cannot be found"):
        modules.read(text).executed_counts()


# --- compiled for TPUs ---

FOR_TPU = """
import sys
import jax, jax.numpy as jnp, numpy as np
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec as P

devices = np.array(topologies.get_topology_desc("v5e:2x2", platform="tpu").devices)
auto = (jax.sharding.AxisType.Auto,) * 2
mesh = jax.sharding.Mesh(devices.reshape(2, 2), ("data", "fsdp"), axis_types=auto)

def step(x_BD, w_NDD):
    def layer(x_BD, w_shard_DD):
        w_DD = jax.lax.all_gather(w_shard_DD, "fsdp", axis=0, tiled=True)
        part = jax.lax.psum_scatter(x_BD @ w_DD, "data", scatter_dimension=0, tiled=True)
        return jax.lax.all_gather(jnp.tanh(part), "data", axis=0, tiled=True), None
    return jax.lax.scan(layer, x_BD, w_NDD)[0]

specs = (P(), P(None, "fsdp"))
mapped = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)
shapes = ((256, 512), (7, 512, 512))
arguments = [
    jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
    for shape, spec in zip(shapes, specs)
]
open(sys.argv[1], "w").write(jax.jit(mapped).lower(*arguments).compile().as_text())
"""


@pytest.mark.tpu_compiler
@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="libtpu, which holds the TPU compiler, is not installed; the extra `tpu` installs it",
)
def test_program_compiled_for_tpus_is_read(tmp_path):
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        # Several may compile at once: no TPU is touched.
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }
    command = [sys.executable, "-c", FOR_TPU, str(tmp_path / "module.txt")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    module = modules.read((tmp_path / "module.txt").read_text())
    assert module.num_devices == 4
    assert [loop.trips for loop in module.loops] == [7]
    w, x = 256 * 512 * 2, 256 * 512 * 2  # bytes of a device's slice of w, and of x
    assert module.traffic({"data": 2, "fsdp": 2}) == {
        ("all-gather", ("fsdp",)): Traffic(7, 7 * w, 7 * w),
        ("reduce-scatter", ("data",)): Traffic(7, 7 * x, 7 * x // 2),
        ("all-gather", ("data",)): Traffic(7, 7 * x // 2, 7 * x // 2),
    }
    assert sum(module.contractions().values()) == 7
    # 7 products of 256 x 512 x 512 on four units of 128 x 128: 28,672 cycles at the least.
    assert 28_672 < module.estimated_cycles() < 1_000_000
