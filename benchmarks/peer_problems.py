"""The problems on which the null-space step meets its peers: parameters, a loss, and rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float, PyTree

import constrainx as cx
from constrainx.models import MLP, LeNet, Swin
from constrainx.recipes import o3_inertia

GAMMA = 0.5
LEAVES = 10


@dataclasses.dataclass(frozen=True)
class Problem:
    """A loss and a constraint on the same parameters.

    Attributes:
        name: what it is.
        parameters: where training starts.
        loss: parameters ↦ a number.
        constraints: as `cx.project` takes them.
        batch: what the constraint looks at.
        rate: the learning rate of gradient descent.
        weights: of the penalty and the Lagrangian, from which the best is taken.
        stores_rows: whether to try the Gram matrix, which may have to store a gradient for each
            row.
    """

    name: str
    parameters: PyTree
    loss: Callable[[PyTree], Float[Array, ""]]
    constraints: cx.Composed
    batch: Any = None
    rate: float = 1e-2
    weights: tuple[float, ...] = (10.0, 100.0)
    stores_rows: bool = True

    def rows(self, parameters: PyTree) -> Float[Array, " rows"]:
        """c, as anyone would write it down."""
        (member,) = self.constraints.members
        (key,) = self.constraints.keys(jax.random.key(0))
        return member.rows(parameters, self.batch, key, None)


def all_problems(*, quick: bool) -> Iterator[Problem]:
    """The problems one by one, so that each can be forgotten before the next is built."""
    if quick:
        yield dataclasses.replace(scalar_budget(10_000), weights=(10.0,))
        return
    for size in (1_000_000, 10_000_000, 100_000_000):
        yield scalar_budget(size)
    for reduce in ("mean", "none"):
        yield inertia(reduce, width=384, examples=128)
    for rows in (48, 192):
        yield turned_images(rows)
    yield sparse_swin()
    for rows in (64, 256, 1024):
        yield boundary(rows)


def scalar_budget(size: int) -> Problem:
    """‖θ‖² = 1 on ten leaves: one row, and a cheap one."""
    keys = jax.random.split(jax.random.key(0), LEAVES)
    shape = (size // LEAVES // 50, 50)
    parameters = {f"layer {i}": jax.random.normal(k, shape) for i, k in enumerate(keys)}
    parameters = jax.tree.map(lambda leaf: leaf / size**0.5, parameters)

    def budget(parameters: PyTree) -> Array:
        return sum(jnp.sum(leaf * leaf) for leaf in parameters.values()) - 0.5

    return Problem(
        f"(a) budget, {size:,} parameters, 1 row",
        parameters,
        # Somewhere to go that is not along the row.
        lambda p: sum(jnp.sum(0.5 * (leaf - 1e-4) ** 2) for leaf in p.values()),
        cx.compose(budget, gamma=GAMMA),
    )


def inertia(reduce: str, *, width: int, examples: int) -> Problem:
    """O(3) on the network of o3-inertia: nine means over the batch, or nine rows an example."""
    model = MLP((20, width, width, width, 9), rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(1), (examples, 20))
    constraint = cx.Equivariance(
        o3_inertia.GROUP,
        input=o3_inertia.INPUT,
        output=o3_inertia.OUTPUT,
        reduce=reduce,
        gamma=GAMMA,
    )
    rows = 9 if reduce == "mean" else 9 * examples
    target = o3_inertia.inertia(x)
    return _network_problem(
        f"(b) O(3), MLP of width {width}, {rows} rows",
        model,
        lambda m: jnp.mean((m(x) - target) ** 2),
        constraint,
        x,
        stores_rows=rows <= 64,
    )


class Turned(cx.Constraint):
    """Features of a turned image are the turned features: a row for each image and turn."""

    def residual(self, model: Any, batch: Any, *, key: Array) -> Array:  # noqa: ARG002
        """f(g x) − g f(x)."""
        features, turned = model.features(batch["x"]), model.features(batch["turned"])
        turns = [jnp.rot90(features, k, axes=(1, 2)) for k in (1, 2, 3)]
        chosen = batch["turn"][:, None, None, None]
        return turned - jnp.where(chosen == 1, turns[0], jnp.where(chosen == 2, turns[1], turns[2]))


def turned_images(rows: int) -> Problem:
    """LeNet under C4: three turns an image, each with a row of its own."""
    model = LeNet(rngs=nnx.Rngs(0))
    rng = np.random.default_rng(0)
    images = np.repeat(rng.normal(size=(-(-rows // 3), 28, 28, 1)), 3, axis=0)[:rows]
    turn = np.arange(rows) % 3 + 1
    turned = np.stack([np.rot90(x, k) for x, k in zip(images, turn, strict=True)])
    batch = {
        "x": jnp.asarray(images, jnp.float32),
        "turned": jnp.asarray(turned, jnp.float32),
        "turn": jnp.asarray(turn),
    }
    few, labels = batch["x"][:16:3], jnp.asarray(rng.integers(0, 10, len(batch["x"][:16:3])))

    def loss(model: LeNet) -> Array:
        return optax.softmax_cross_entropy_with_integer_labels(model(few), labels).mean()

    constraint = Turned(reduce="norm", gamma=GAMMA)
    return _network_problem(f"(c) C4, LeNet, {rows} rows", model, loss, constraint, batch)


def sparse_swin() -> Problem:
    """Half of the weights of Swin-T, by masks; the loss is a stand-in for a backward pass."""
    model = Swin.tiny(rngs=nnx.Rngs(0))
    cx.masks.add_masks(model)
    constraints = cx.compose(cx.MaskBudget(0.5, gamma=GAMMA), model=model)
    parameters = nnx.state(model, cx.masks.MaskProbability)
    count = sum(leaf.size for leaf in jax.tree.leaves(parameters))
    return Problem(
        f"(d) Swin, {count:,} masks, 1 row",
        parameters,
        lambda p: sum(jnp.sum(0.5 * (leaf - 0.9) ** 2) for leaf in jax.tree.leaves(p)),
        constraints,
        weights=(1e8, 1e9),
    )


class Fixed(cx.Constraint):
    """u = 0 on the boundary, a row for each point."""

    def residual(self, model: Any, batch: Any, *, key: Array) -> Array:  # noqa: ARG002
        """The values of u there."""
        return model(batch)[:, 0]


def boundary(rows: int) -> Problem:
    """−Δu = 1 on a square by a small network, and u = 0 at points of its boundary."""
    model = MLP((2, 64, 64, 1), activation=jnp.tanh, rngs=nnx.Rngs(0))
    rng = np.random.default_rng(0)
    inside = jnp.asarray(rng.uniform(size=(128, 2)), jnp.float32)
    along = np.linspace(0, 4, rows, endpoint=False)
    side, t = along.astype(int), along % 1
    corners = np.array([[0, 0], [1, 0], [1, 1], [0, 1], [0, 0]])
    points = corners[side] * (1 - t)[:, None] + corners[side + 1] * t[:, None]

    def loss(model: MLP) -> Array:
        def value(x: Array) -> Array:
            return model(x[None])[0, 0]

        curvature = jax.vmap(lambda x: jnp.trace(jax.hessian(value)(x)))(inside)
        return jnp.mean((curvature + 1) ** 2)

    name = f"(e) PINN, {rows} boundary rows"
    constraint = Fixed(reduce="none", gamma=GAMMA)
    return _network_problem(name, model, loss, constraint, jnp.asarray(points, jnp.float32))


def _network_problem(
    name: str, model: nnx.Module, loss: Callable, constraint: cx.Constraint, batch: Any, **more: Any
) -> Problem:
    graph, parameters, rest = nnx.split(model, nnx.Param, ...)

    def of_parameters(parameters: PyTree) -> Array:
        return loss(nnx.merge(graph, parameters, rest))

    constraints = cx.compose(constraint, model=model)
    return Problem(name, parameters, of_parameters, constraints, batch, **more)
