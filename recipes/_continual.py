"""A network that learns tasks in turn, and what it remembers of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, PyTree

from constrainx.data import Memory
from constrainx.models import MLP
from constrainx.trainers.classification import cross_entropy

Keeps: TypeAlias = Literal["nothing", "importance", "inputs"]
# Gradients that are squared at a time.
TOGETHER = 8


class Recorded(nnx.Variable):
    """What a learner records of the tasks behind it; it is not trained."""


class Learner(nnx.Module):
    """A network with a memory, which looks back when a task ends.

    The memory is a sample of all examples so far. At the end of each task, the logits of those that
    came with it are added, and only then are they drawn.

    Attributes:
        network: what is trained.
        memory: with the entries x, y, outputs and ready.
        tasks: how many there are.
        period: how often the loss is called in each of them.
        keeps: what it measures at the end of a task: the "importance" of each parameter, for
            elastic weight consolidation, the directions of the "inputs" of each layer, or nothing.
    """

    def __init__(
        self, network: MLP, *, example: Array, size: int, tasks: int, period: int, keeps: Keeps
    ):
        self.network = network
        classes = network.layers[-1].out_features
        self.memory = Memory(
            size,
            only="ready",
            x=example,
            y=jnp.zeros((), jnp.int32),
            outputs=jnp.zeros(classes),
            ready=jnp.zeros(()),
        )
        self.tasks, self.period, self.keeps = tasks, period, keeps
        self.calls = Recorded(jnp.zeros((), jnp.int32))
        parameters = jax.tree.leaves(nnx.state(network, nnx.Param))
        # What the network was at the end of each task but the last, to tell what it forgets.
        self.earlier = nnx.List([Recorded(jnp.zeros((tasks - 1, *p.shape))) for p in parameters])
        if keeps == "importance":
            self.anchor = nnx.List([Recorded(jnp.zeros_like(p)) for p in parameters])
            self.importance = nnx.List([Recorded(jnp.zeros_like(p)) for p in parameters])
        if keeps == "inputs":
            sizes = [layer.in_features + 1 for layer in network.layers]
            self.moments = nnx.List([Recorded(jnp.zeros((n, n))) for n in sizes])
            self.projectors = nnx.List([Recorded(jnp.eye(n)) for n in sizes])

    def __call__(self, x: Float[Array, "batch inputs"]) -> Float[Array, "batch classes"]:
        """The logits."""
        return self.network(x)

    def observe(self, batch: dict[str, Array], key: Array, *, share: float) -> None:
        """Takes a sample of a batch into the memory, and looks back if it is the last of a task.

        Args:
            batch: of the task.
            key: for the sample.
            share: the share of the squared inputs of a layer that Adam-NSCL leaves free.
        """
        self.memory.add(key, x=batch["x"], y=batch["y"])
        self.calls[...] = self.calls[...] + 1
        ends = self.calls[...] % self.period == 0
        graph, state = nnx.split((self.network, self.memory, self._records()))
        state = jax.lax.stop_gradient(state)

        def look_back(state: nnx.State) -> nnx.State:
            network, memory, records = nnx.merge(graph, state)
            self._look_back(network, memory, records, share)
            return nnx.state((network, memory, records))

        after = jax.lax.cond(ends, look_back, lambda state: state, state)
        _, memory, records = nnx.merge(graph, after)
        nnx.update(self.memory, nnx.state(memory))
        nnx.update(self._records(), nnx.state(records))

    def _records(self) -> nnx.Dict:
        names = ("earlier", "anchor", "importance", "moments", "projectors")
        return nnx.Dict({name: getattr(self, name) for name in names if hasattr(self, name)})

    def _look_back(self, network: MLP, memory: Memory, records: Any, share: float) -> None:
        is_new = memory.is_filled & (memory["ready"] == 0)
        outputs = network(memory["x"])
        old = memory["ready"][:, None] != 0
        memory.replace(
            outputs=jnp.where(old, memory["outputs"], outputs),
            ready=memory.is_filled.astype(jnp.float32),
        )
        parameters = jax.tree.leaves(nnx.state(network, nnx.Param))
        task = self.calls[...] // self.period - 1
        for record, now in zip(records["earlier"], parameters, strict=True):
            record[...] = record[...].at[task].set(now, mode="drop")
        if self.keeps == "importance":
            squares = _square_gradients(network, memory, is_new)
            for total, new in zip(records["importance"], squares, strict=True):
                total[...] = total[...] + new
            for anchor, now in zip(records["anchor"], parameters, strict=True):
                anchor[...] = now
        if self.keeps == "inputs":
            inputs = _find_inputs(network, memory["x"])
            for moment, projector, found in zip(
                records["moments"], records["projectors"], inputs, strict=True
            ):
                new = jnp.where(is_new[:, None], found, 0)
                moment[...] = moment[...] + new.T @ new / jnp.maximum(jnp.sum(is_new), 1)
                projector[...] = _project_away(moment[...], share)

    def drift(self) -> Float[Array, ""]:
        """Σ F (θ − θ*)² / 2, the penalty of elastic weight consolidation."""
        parameters = jax.tree.leaves(nnx.state(self.network, nnx.Param))
        return sum(
            (
                jnp.sum(weight[...] * jnp.square(now - anchor[...])) / 2
                for weight, now, anchor in zip(
                    self.importance, parameters, self.anchor, strict=True
                )
            ),
            jnp.zeros(()),
        )

    def recall(self, task: int) -> MLP:
        """The network at the end of a task."""
        if task == self.tasks - 1:
            return self.network
        graph, parameters = nnx.split(self.network)
        leaves = [record[...][task] for record in self.earlier]
        return nnx.merge(graph, jax.tree.unflatten(jax.tree.structure(parameters), leaves))


def _square_gradients(network: MLP, memory: Memory, is_new: Array) -> list[Array]:
    """The mean of the squared gradients of log p over examples, which is Fisher's diagonal."""
    graph, parameters = nnx.split(network)
    x, y = memory["x"], memory["y"]

    def one(x: Array, y: Array, counts: Array) -> list[Array]:
        def loss(p: PyTree) -> Array:
            return cross_entropy(nnx.merge(graph, p), {"x": x[None], "y": y[None]})[0]

        return [counts * jnp.square(g) for g in jax.tree.leaves(jax.grad(loss)(parameters))]

    def add(sums: list[Array], part: tuple[Array, ...]) -> tuple[list[Array], None]:
        found = jax.vmap(one)(*part)
        return [s + jnp.sum(f, axis=0) for s, f in zip(sums, found, strict=True)], None

    parts = [
        jnp.pad(leaf, [(0, -len(x) % TOGETHER)] + [(0, 0)] * (leaf.ndim - 1)).reshape(
            -1, TOGETHER, *leaf.shape[1:]
        )
        for leaf in (x, y, is_new.astype(jnp.float32))
    ]
    zeros = [jnp.zeros_like(leaf) for leaf in jax.tree.leaves(parameters)]
    sums, _ = jax.lax.scan(add, zeros, tuple(parts))
    return [total / jnp.maximum(jnp.sum(is_new), 1) for total in sums]


def _find_inputs(network: MLP, x: Float[Array, "n inputs"]) -> list[Array]:
    """What goes into each layer, with a one for its bias."""
    found = []
    ones = jnp.ones((len(x), 1))
    for layer in network.layers:
        found.append(jnp.concatenate([x, ones], axis=1))
        x = network.activation(layer(x))
    return found


def _project_away(moment: Float[Array, "n n"], share: float) -> Float[Array, "n n"]:
    """A projection on the directions with the smallest part of the inputs, that share in total."""
    values, vectors = jnp.linalg.eigh(moment)
    values = jnp.maximum(values, 0)
    small = jnp.cumsum(values) <= share * jnp.sum(values)
    return (vectors * small) @ vectors.T


def weigh_mean(values: Float[Array, " n"], weights: Float[Array, " n"]) -> Float[Array, ""]:
    """The mean of what counts; zero if nothing does."""
    return jnp.sum(weights * values) / jnp.maximum(jnp.sum(weights), 1)


def evaluate_each(model: Callable[[Array], Array], tests: list[dict[str, Any]]) -> list[float]:
    """The accuracy on each task."""
    found = []
    for test in tests:
        right = jnp.argmax(model(jnp.asarray(test["x"])), axis=-1) == jnp.asarray(test["y"])
        found.append(float(jnp.mean(right)))
    return found
