"""The collectives of a compiled program, and those among them that a constraint adds."""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Iterable, Iterator

import numpy as np

from constrainx.plan._hlo import Executed, Module, count_bytes, find_arrays

KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective:
    """An exchange between devices of one array.

    XLA exchanges many arrays in one call where it can; each of them is listed.

    Attributes:
        kind: such as "all-reduce".
        shape: such as "f32[512]", of the whole array: what a gather results in, or a scatter takes.
        bytes: of that.
        group: how many devices take part together.
        crosses_hosts: whether they are on several hosts.
        times: how often a step does it, or an iteration.
        is_iterated: whether it is in a loop whose length depends on the data, such as LSMR's.
    """

    kind: str
    shape: str
    bytes: int
    group: int
    crosses_hosts: bool
    times: int
    is_iterated: bool


def read_collectives(text: str, *, per_host: int = 8) -> list[Collective]:
    """The collectives of a compiled program.

    Args:
        text: what `jax.stages.Compiled.as_text` returns.
        per_host: how many devices a host has.
    """
    module = Module(text)
    return [
        found for executed in module.walk() for found in _as_collectives(module, executed, per_host)
    ]


def find_added(
    with_constraints: Iterable[Collective], without: Iterable[Collective]
) -> list[Collective]:
    """The collectives of one step that another does not have, by kind, size and place.

    XLA packs arrays together, and a buffer with a few numbers more is no new buffer: of those
    without an equal in the other step only the bytes that it does not have count, and the largest
    are taken to be the same.
    """

    def place(found: Collective) -> tuple[object, ...]:
        return found.kind, found.group, found.times, found.is_iterated

    # Not by shape: the same array may have another one after a transposition.
    equal = collections.Counter((place(found), found.bytes) for found in without)
    others = []
    for found in with_constraints:
        if equal[place(found), found.bytes] > 0:
            equal[place(found), found.bytes] -= 1
        else:
            others.append(found)
    left: collections.Counter[tuple[object, ...]] = collections.Counter()
    for (where, size), count in equal.items():
        left[where] += size * count
    added = []
    for found in sorted(others, key=lambda one: -one.bytes):
        same = min(left[place(found)], found.bytes)
        left[place(found)] -= same
        if same < found.bytes:
            shape = f"part of {found.shape}" if same else found.shape
            added.append(dataclasses.replace(found, shape=shape, bytes=found.bytes - same))
    return added


def _as_collectives(module: Module, executed: Executed, per_host: int) -> Iterator[Collective]:
    found = executed.instruction
    kind = found.opcode.removesuffix("-start")
    if kind not in KINDS:
        return
    operands, results = module.operand_shapes(executed), find_arrays(found.shape)
    if found.opcode.endswith("-start") and len(results) > len(operands):
        # Operands and results, and on some devices a few numbers for bookkeeping.
        results = results[len(operands) : 2 * len(operands)]
    group, crosses_hosts = _read_group(found.attributes, per_host)
    if kind == "all-to-all" and len(operands) > 1:
        # One operand for each device: together, one array.
        whole = [max(operands + results, key=count_bytes)]
        sizes = [max(sum(map(count_bytes, side)) for side in (operands, results))]
    else:
        pairs = list(zip(operands or results, results, strict=False))
        whole = [max(pair, key=count_bytes) for pair in pairs]
        sizes = [count_bytes(shape) for shape in whole]
    for shape, size in zip(whole, sizes, strict=True):
        yield Collective(
            kind=kind,
            shape=shape,
            bytes=size,
            group=group,
            crosses_hosts=crosses_hosts,
            times=executed.times,
            is_iterated=executed.is_iterated,
        )


def _read_group(attributes: str, per_host: int) -> tuple[int, bool]:
    """How many devices take part together, and whether they are on several hosts."""
    groups = _read_groups(attributes)
    if groups is None:
        return 0, False
    crosses = bool(np.any(groups // per_host != groups[:, :1] // per_host))
    return groups.shape[1], crosses


def _read_groups(attributes: str) -> np.ndarray | None:
    """The groups of devices, in any of the ways in which XLA writes them; None if it does not."""
    if found := re.search(r"source_target_pairs=\{(\{[^=]*?\})\}", attributes):
        return _as_groups(found[1])
    if found := re.search(r"replica_groups=\{(\{[^=]*?\})\}", attributes):
        return _as_groups(found[1])
    if found := re.search(
        r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", attributes
    ):
        sizes = [int(n) for n in found[3].split(",")]
        order = [int(n) for n in found[4].split(",")] if found[4] else range(len(sizes))
        devices = np.arange(math.prod(sizes)).reshape(sizes).transpose(order)
        return devices.reshape(int(found[1]), int(found[2]))
    if found := re.search(r"replica_groups=mesh\[(.*?)\](?:<=\[.*?\])? \{(.*?)\}", attributes):
        axes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", found[1])}
        taken = re.findall(r"'(\w+)'", found[2])
        devices = np.arange(math.prod(axes.values())).reshape(tuple(axes.values()))
        position = [list(axes).index(name) for name in taken]
        moved = np.moveaxis(devices, position, range(-len(position), 0)) if taken else devices
        return moved.reshape(-1, math.prod(axes[name] for name in taken))
    return None


def _as_groups(text: str) -> np.ndarray | None:
    groups = [[int(n) for n in one.split(",")] for one in re.findall(r"\{([\d,]+)\}", text)]
    return np.array(groups) if groups and len({*map(len, groups)}) == 1 else None
