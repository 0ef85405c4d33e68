"""What is read from the text of a compiled program."""

import dataclasses

import pytest

from constrainx.plan import Collective, find_added, read_collectives
from constrainx.plan._hlo import count_moved_bytes

# In the three ways in which XLA writes groups, synchronous and not, in a loop of known length and
# in one whose length depends on the data.
PROGRAM = """\
HloModule jit_step, is_scheduled=true

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

%scanned (carry: (s32[], f32[4])) -> (s32[], f32[4]) {
  %carry = (s32[], f32[4]{0}) parameter(0)
  %value = f32[4]{0} get-tuple-element(%carry), index=1
  ROOT %all-reduce.1 = f32[4]{0} all-reduce(%value), replica_groups=[4,4]<=[4,4]T(1,0), to_apply=%add
}

%iterated (state: (f32[16])) -> (f32[16]) {
  %state = (f32[16]{0}) parameter(0)
  %rows = f32[16]{0} get-tuple-element(%state), index=0
  %all-reduce.2 = f32[] all-reduce(%rows), replica_groups=mesh['a'=2,'b'=8] {'b'}, to_apply=%add
}

%check (state: (f32[16])) -> pred[] {
  %all = (f32[16]{0}) parameter(0)
}

ENTRY %main (w: f32[8,16], v: bf16[3]) -> f32[16,16] {
  %w = f32[8,16]{1,0} parameter(0)
  %v = bf16[3]{0} parameter(1)
  %all-gather-start = (f32[8,16]{1,0}, f32[16,16]{1,0}) all-gather-start(%w), replica_groups={{0,8},{1,9}}, dimensions={0}
  %all-gather-done = f32[16,16]{1,0} all-gather-done(%all-gather-start)
  %all-reduce.3 = (f32[8,16]{1,0}, /*index=1*/bf16[3]{0}) all-reduce(%w, /*index=1*/%v), replica_groups={{0,1},{2,3}}, to_apply=%add
  %reduce-scatter = f32[4,16]{1,0} reduce-scatter(%w), replica_groups={{0,1}}, dimensions={0}
  %loop.1 = (s32[], f32[4]{0}) while(%w), condition=%check, body=%scanned, backend_config={"known_trip_count":{"n":"5"}}
  %loop.2 = (f32[16]{0}) while(%w), condition=%check, body=%iterated
  ROOT %copy = f32[16,16]{1,0} copy(%all-gather-done)
}
"""  # noqa: E501


@pytest.fixture(scope="module")
def found():
    return read_collectives(PROGRAM)


def test_every_array_is_listed_with_the_size_of_the_whole(found):
    assert [(one.kind, one.shape, one.bytes) for one in found] == [
        ("all-gather", "f32[16,16]", 1024),
        ("all-reduce", "f32[8,16]", 512),
        ("all-reduce", "bf16[3]", 6),
        ("reduce-scatter", "f32[8,16]", 512),
        ("all-reduce", "f32[4]", 16),
        ("all-reduce", "f32[16]", 64),
    ]


def test_loops_are_told_apart(found):
    assert [one.times for one in found] == [1, 1, 1, 1, 5, 1]
    assert [one.is_iterated for one in found] == [False] * 5 + [True]


def test_groups_are_read(found):
    assert [one.group for one in found] == [2, 2, 2, 2, 4, 8]
    # Eight devices a host: 0 and 8 are on two, and so are 0, 4, 8 and 12.
    assert [one.crosses_hosts for one in found] == [True, False, False, False, True, False]


def test_what_is_added_is_what_is_not_there_otherwise(found):
    assert find_added(found, found) == []
    assert find_added(found, found[:-1]) == found[-1:]


def test_a_buffer_with_a_few_numbers_more_is_no_new_buffer():
    plain = Collective(
        kind="all-reduce", shape="f32[1000]", bytes=4000, group=8,
        crosses_hosts=False, times=1, is_iterated=False,
    )  # fmt: skip
    longer = dataclasses.replace(plain, shape="f32[1002]", bytes=4008)
    (added,) = find_added([longer], [plain])
    assert (added.bytes, added.shape) == (8, "part of f32[1002]")


def test_a_fusion_that_takes_a_slice_reads_no_more_than_it():
    text = """\
%fused (stack: f32[12,64], index: s32[]) -> f32[1,64] {
  %stack = f32[12,64]{1,0} parameter(0)
  %index = s32[] parameter(1)
  %slice = f32[1,64]{1,0} dynamic-slice(%stack, %index, %index), dynamic_slice_sizes={1,64}
  ROOT %double = f32[1,64]{1,0} add(%slice, %slice)
}

ENTRY %main (stack: f32[12,64], index: s32[]) -> f32[1,64] {
  %stack.1 = f32[12,64]{1,0} parameter(0)
  %index.1 = s32[] parameter(1)
  ROOT %fusion = f32[1,64]{1,0} fusion(%stack.1, %index.1), kind=kLoop, calls=%fused
}
"""
    assert count_moved_bytes(text) == (256 + 256 + 4, 0)


def test_moved_bytes_are_those_of_operands_and_results():
    copy = 2 * 1024
    gather = 512 + 512 + 1024
    reduce = 2 * (512 + 6)
    scatter = 512 + 256
    assert count_moved_bytes(PROGRAM) == (copy + gather + reduce + scatter + 5 * 32, 64 + 4)
