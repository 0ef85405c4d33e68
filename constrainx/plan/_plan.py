"""A plan: what the step of a trainer costs, and what of that its constraints add."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import math
import os
import time
from typing import Any

import jax
from jaxtyping import PyTree

from constrainx.plan._collectives import Collective, find_added, read_collectives
from constrainx.plan._flops import Flops, count_flops
from constrainx.plan._hlo import count_moved_bytes
from constrainx.plan._largest import USABLE, find_largest
from constrainx.plan._memory import Memory, read_memory
from constrainx.plan._roofline import Estimate, estimate_time
from constrainx.plan._targets import Target
from constrainx.trainers import Trainer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What one step costs.

    Attributes:
        target: the kind of device.
        mesh: how many devices each axis has.
        batch: the size of the global batch.
        parameters: how many are trained.
        state: bytes of parameters, optimizer and all else that a checkpoint holds.
        state_held: of that, on each device.
        memory: of the compiled step, on each device.
        capacity: bytes that a device has.
        flops: of all devices together.
        moved: bytes between the memory of a device and its chip, in a step and in each iteration.
        collectives: what devices exchange.
        added: of that, what the constraints add.
        memory_added: bytes of the peak that the constraints add.
        compile_seconds: of tracing and compiling the step with and without its constraints, both at
            once.
        estimate: of its time; None for simulated devices.
        largest_batch: the largest that fits; None if that was not asked for.
    """

    target: Target
    mesh: dict[str, int]
    batch: int
    parameters: int
    state: int
    state_held: int
    memory: Memory
    capacity: int
    flops: Flops
    moved: tuple[int, int]
    collectives: tuple[Collective, ...]
    added: tuple[Collective, ...]
    memory_added: int
    compile_seconds: float
    estimate: Estimate | None
    largest_batch: int | None = None

    @property
    def devices(self) -> int:
        """How many there are."""
        return self.mesh["data"] * self.mesh["fsdp"]

    @property
    def fits(self) -> bool:
        """Whether the peak leaves a tenth of the memory free."""
        return self.memory.peak <= USABLE * self.capacity


def make_plan(
    trainer: Trainer,
    target: Target,
    *,
    batch: int | None = None,
    iterations: int = 10,
    largest_batch: bool = False,
) -> Plan:
    """Compiles a trainer's step for its mesh, with and without its constraints.

    Args:
        trainer: on a mesh of the target's devices; best without arrays, see
            `constrainx.recipes.build_abstract`.
        target: the kind of device.
        batch: the size of the global batch; that of the trainer by default.
        iterations: to assume for loops whose length depends on the data.
        largest_batch: whether to look for the largest batch that fits, which compiles the step a
            few times more.
    """
    count = trainer.data.batch if batch is None else batch
    sizes: dict[str, int] = dict(trainer.sharding.mesh.shape)
    devices = trainer.sharding.mesh.size
    start = time.perf_counter()
    traced = trainer.trace(batch=count)
    lowered = [traced.lower()]
    if trainer.constraint_names:
        unconstrained = dataclasses.replace(trainer, method="none")
        lowered.append(unconstrained.lower(batch=count))
    # Much of compiling uses one core.
    with concurrent.futures.ThreadPoolExecutor() as pool:
        steps = list(pool.map(lambda step: step.compile(target.compiler_options), lowered))
    seconds = time.perf_counter() - start
    compiled, *others = steps
    text = compiled.as_text() or ""
    memory, collectives = read_memory(compiled), read_collectives(text, per_host=target.per_host)
    added, memory_added = [], 0
    for plain in others:
        shared = read_collectives(plain.as_text() or "", per_host=target.per_host)
        added = find_added(collectives, shared)
        memory_added = memory.peak - read_memory(plain).peak
    flops, moved = count_flops(traced.jaxpr), count_moved_bytes(text)
    capacity = _measure_machine() // devices if target.memory is None else target.memory
    largest = None
    if largest_batch:
        largest = find_largest(
            lambda size: (
                read_memory(trainer.lower(batch=size).compile(target.compiler_options)).peak
            ),
            limit=USABLE * capacity,
            unit=devices * trainer.accumulate,
            start=count,
        )
    return Plan(
        target=target,
        mesh=sizes,
        batch=count,
        parameters=sum(leaf.size for leaf in jax.tree.leaves(trainer.state.parameters)),
        state=_count_bytes(trainer.state),
        state_held=_count_held(trainer),
        memory=memory,
        capacity=capacity,
        flops=flops,
        moved=moved,
        collectives=tuple(collectives),
        added=tuple(added),
        memory_added=memory_added,
        compile_seconds=seconds,
        estimate=estimate_time(
            target,
            devices=devices,
            flops=flops,
            moved=moved,
            collectives=collectives,
            iterations=iterations,
        ),
        largest_batch=largest,
    )


def _count_bytes(tree: PyTree) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _count_held(trainer: Trainer) -> int:
    def held(leaf: Any) -> int:
        shape = trainer.sharding.of_parameter(leaf).shard_shape(leaf.shape)
        return leaf.dtype.itemsize * math.prod(shape)

    return sum(map(held, jax.tree.leaves(trainer.state)))


def _measure_machine() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
