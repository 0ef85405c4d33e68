"""How often a step with one row passes over memory, in the program compiled for an H100.

No GPU is needed, and no time is measured: each kernel reads its operands and writes its results,
and the sum of these bytes is divided by those of the parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import constrainx as cx
from benchmarks.report import Goal, Report, Table
from benchmarks.twice import all_optimizers
from constrainx.errors import MissingPackageError
from constrainx.plan import TARGETS, count_moved_bytes, make_mesh

LAYERS = 2
SHAPE = (2000, 2500)
TARGET = TARGETS["h100"]
# Adam alone takes 7 passes. A stored row is read for its length, and with all that it corrects.
MOST = {"stored row, twice": 2.2, "mean, twice": 1.6, "mask budget, twice": 1.6}


def run(*, quick: bool) -> Report:
    """Compiles Adam with and without a row for one device."""
    mesh = _find_mesh()
    compiled = {} if mesh is None else _compile_all(mesh, quick=quick)
    rows, goals = [], []
    for name, step in compiled.items():
        passes, adam = (_count_passes(compiled[one]) for one in (name, "Adam"))
        temporary = step.memory_analysis().temp_size_in_bytes / _count_bytes()
        rows.append((name, passes, passes / adam, temporary))
        if name in MOST:
            wanted = f"{name}: at most {MOST[name]} times the passes of Adam alone"
            goals.append(Goal(wanted, f"{passes / adam:.2f} times", passes <= MOST[name] * adam))
    columns = {"step": "", "passes": ".2f", "/ Adam": ".2f", "temporary": ".2f"}
    return Report(
        name="passes",
        setting=(
            f"float32, {LAYERS} layers of {SHAPE[0]} × {SHAPE[1]}, the gradient given, buffers of "
            f"parameters and state donated, compiled for one {TARGET.title}. 'passes' are bytes "
            "that kernels read and write, and 'temporary' memory, both over the bytes of the "
            "parameters. It needs XLA's compiler for GPUs, which the extra `plan` installs."
        ),
        tables=[Table("Adam and one row", columns, rows)],
        goals=goals,
    )


def _find_mesh() -> Mesh | None:
    """One H100, or None where the compiler is not installed."""
    try:
        return make_mesh(TARGET, {"data": 1, "fsdp": 1})
    except MissingPackageError as error:
        print(error)
        return None


def _compile_all(mesh: Mesh, *, quick: bool) -> dict[str, jax.stages.Compiled]:
    where = NamedSharding(mesh, PartitionSpec())
    layer = jax.ShapeDtypeStruct(SHAPE, "float32")
    params = {f"layer {index}": layer for index in range(LAYERS)}
    found = {}
    for name, make in all_optimizers().items():

        def step(params: Any, state: Any, grads: Any, row: Any, make: Callable = make) -> Any:
            updates, state = make(row).update(grads, state, params)
            return optax.apply_updates(params, updates), state

        state = jax.eval_shape(lambda p, make=make: make(p).init(p), params)
        found[name] = _compile(step, where, params, state, params, params)
        if quick:
            break
    if not quick:
        for placement in ("gradient", "twice"):
            name = f"mask budget, {'twice' if placement == 'twice' else 'once'}"
            found[name] = _compile_budget(placement, where)
    return found


def _compile_budget(placement: Any, where: NamedSharding) -> jax.stages.Compiled:
    """Adam on the probabilities of masks, and a `MaskBudget`."""
    model = cx.masks.add_masks(_Layers())
    params = nnx.state(model, cx.masks.MaskProbability)
    method = cx.NullSpace(placement=placement)
    optimizer = cx.constrain(optax.adam(1e-3), cx.MaskBudget(0.5), model=model, method=method)

    def step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = optimizer.update(grads, state, params, module=model)
        return optax.apply_updates(params, updates), state

    return _compile(step, where, params, jax.eval_shape(optimizer.init, params), params)


class _Layers(nnx.Module):
    """Kernels of the same shape as the parameters of the other steps."""

    def __init__(self) -> None:
        keys = nnx.Rngs(0)
        self.layers = nnx.List(
            [nnx.Linear(*SHAPE, use_bias=False, rngs=keys) for _ in range(LAYERS)]
        )


def _compile(step: Callable, where: NamedSharding, *args: Any) -> jax.stages.Compiled:
    placed = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where), args
    )
    lowered = jax.jit(step, donate_argnums=(0, 1)).lower(*placed)
    return lowered.compile(TARGET.compiler_options)


def _count_passes(step: jax.stages.Compiled) -> float:
    once, _ = count_moved_bytes(step.as_text() or "")
    return once / _count_bytes()


def _count_bytes() -> int:
    return 4 * LAYERS * SHAPE[0] * SHAPE[1]
