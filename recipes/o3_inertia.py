"""The moment of inertia of five particles, learnt by a network that does not know about rotations.

    constrainx quickstart

The task of Finzi et al. (EMLP, 2021): masses m and positions r, all N(0, 1), masses through a
softplus; the target is the tensor Σ m (‖r‖² I − r rᵀ), which turns with the particles. Compares
plain training, augmentation by random rotations and reflections, and augmentation with the
constraint f(R r) = R f(r) Rᵀ as 64 rows of a null-space step. Took 3:11 on two busy cores.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Float

from constrainx.constraints import Equivariance, Norm, groups, representations
from constrainx.models import MLP
from constrainx.nullspace import nullspace

Method: TypeAlias = Literal["plain", "augmentation", "null space"]
METHODS: tuple[Method, ...] = ("plain", "augmentation", "null space")

PARTICLES = 5
GROUP = groups.Orthogonal(3)
INPUT = representations.Sum(
    (PARTICLES, representations.Trivial()), (3 * PARTICLES, representations.Vector())
)
OUTPUT = representations.Tensor(2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything that defines a run.

    Attributes:
        epochs: passes over the training data.
        examples: the number of training points.
        batch: examples a step.
        learning_rate: of Adam, decayed to zero by a cosine.
        width: of the three hidden layers.
        rows: of the constraint; each is the norm over batch / rows examples.
        gamma: the strength of the pull to the constraint, times the learning rate.
        seed: of data, network and batches.
    """

    epochs: int = 100
    examples: int = 5000
    batch: int = 128
    learning_rate: float = 1e-3
    width: int = 384
    rows: int = 64
    gamma: float = 10.0
    seed: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Progress:
    """What is known after an epoch.

    Attributes:
        epoch: how many are done.
        loss: the mean squared error on the last batch.
        error: the mean squared error on the test set.
        violation: the mean of ‖f(R r) − R f(r) Rᵀ‖² over the test set, a sum over nine entries.
        seconds: spent in training, compilation not counted.
    """

    epoch: int
    loss: float
    error: float
    violation: float
    seconds: float


def inertia(x: Float[Array, "batch 20"]) -> Float[Array, "batch 9"]:
    """The tensor Σ m (‖r‖² I − r rᵀ), flat."""
    mass = jax.nn.softplus(x[:, :PARTICLES])
    r = x[:, PARTICLES:].reshape(-1, PARTICLES, 3)
    spread = jnp.einsum("bp,bpi,bpi->b", mass, r, r)[:, None, None] * jnp.eye(3)
    return (spread - jnp.einsum("bp,bpi,bpj->bij", mass, r, r)).reshape(-1, 9)


def constraint(settings: Settings) -> Equivariance:
    """The network turns with the particles."""
    return Equivariance(
        GROUP,
        input=INPUT,
        output=OUTPUT,
        reduce=Norm(groups=settings.rows),
        gamma=settings.gamma,
        name="O(3)",
    )


def augmented(x: Float[Array, "batch 20"], key: Array) -> Float[Array, "batch 20"]:
    """Each example turned by a random rotation or reflection of its own."""
    turns = GROUP.sample(key, len(x))
    return jax.vmap(lambda g, example: INPUT(GROUP, g, example))(turns, x)


def train(method: Method, settings: Settings) -> Iterator[Progress]:
    """Trains one network, and reports after each epoch."""
    key = jax.random.key(settings.seed)
    x = jax.random.normal(jax.random.fold_in(key, 0), (settings.examples, 4 * PARTICLES))
    test = jax.random.normal(jax.random.fold_in(key, 1), (2000, 4 * PARTICLES))
    widths = (4 * PARTICLES, *(settings.width,) * 3, 9)
    model = MLP(widths, rngs=nnx.Rngs(settings.seed))
    equivariant = constraint(settings)
    steps = settings.examples // settings.batch
    rate = optax.cosine_decay_schedule(settings.learning_rate, settings.epochs * steps)
    optimizer = optax.adam(rate)
    if method == "null space":
        optimizer = optax.chain(nullspace(equivariant, model=model), optimizer)
    graph, state = nnx.split((model, nnx.Optimizer(model, optimizer, wrt=nnx.Param)))

    def step(state: Any, order: Array, index: Array, key: Array) -> tuple[Any, Array]:
        model, optimizer = nnx.merge(graph, state)
        key = jax.random.fold_in(key, index)
        rows = jax.lax.dynamic_slice_in_dim(order, index * settings.batch, settings.batch)
        batch = {"x": x[rows] if method == "plain" else augmented(x[rows], key)}
        target = inertia(batch["x"])
        loss, grads = nnx.value_and_grad(lambda m: jnp.mean((m(batch["x"]) - target) ** 2))(model)
        extra = {"batch": batch, "key": key} if method == "null space" else {}
        optimizer.update(model, grads, **extra)
        return nnx.state((model, optimizer)), loss

    def evaluate(state: Any) -> tuple[Array, Array]:
        model, _ = nnx.merge(graph, state)
        error = jnp.mean((model(test) - inertia(test)) ** 2)
        return error, equivariant.violation(model, {"x": test}, jax.random.fold_in(key, 2))

    run, measure = _compiled(step, evaluate, state, settings)
    seconds = 0.0
    for epoch in range(settings.epochs):
        here = jax.random.fold_in(key, 3 + epoch)
        order = jax.random.permutation(here, settings.examples)
        start = time.perf_counter()
        for index in range(steps):
            state, loss = run(state, order, jnp.asarray(index), here)
        jax.block_until_ready(state)
        seconds += time.perf_counter() - start
        error, violation = measure(state)
        yield Progress(
            epoch=epoch + 1,
            loss=float(loss),
            error=float(error),
            violation=float(violation),
            seconds=seconds,
        )


def _compiled(
    step: Callable, evaluate: Callable, state: Any, settings: Settings
) -> tuple[Callable, Callable]:
    order = jnp.arange(settings.examples)
    arguments = (state, order, jnp.asarray(0), jax.random.key(0))
    return (
        jax.jit(step, donate_argnums=0).lower(*arguments).compile(),
        jax.jit(evaluate).lower(state).compile(),
    )
