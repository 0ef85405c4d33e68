"""Rows of single examples are found, and no others."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import constrainx as cx
from constrainx.models import MLP
from constrainx.step import Point, explain_route
from constrainx.step._linearise import linearise

EXAMPLES = 12


class Net(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.first = nnx.Linear(3, 5, rngs=rngs)
        self.last = nnx.Linear(5, 2, rngs=rngs)
        self.conv = nnx.Conv(1, 2, kernel_size=(3,), rngs=rngs)
        self.table = nnx.Embed(4, 3, rngs=rngs)
        self.norm = nnx.LayerNorm(5, rngs=rngs)
        self.batch_norm = nnx.BatchNorm(5, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.last(nnx.relu(self.norm(self.first(x))))

    def in_training(self, x):
        hidden = self.first(x)
        return self.last(self.batch_norm(hidden, use_running_average=False))[:, 0]


def sum_by_loop(model, batch):
    def add(total, x):
        return total + model(x)[..., 0], None

    start = jnp.zeros_like(batch["x"][:, 0])
    return jax.lax.scan(add, start, jnp.stack([batch["x"], -batch["x"]]))[0]


def pick_label(model, batch):
    return jnp.take_along_axis(model(batch["x"]), batch["y"][:, None], axis=1)[:, 0]


def attend(model, batch):
    tokens = jnp.stack([model.first(batch["x"]), model.first(-batch["x"])], axis=1)
    weights = jax.nn.softmax(jnp.einsum("nti,nsi->nts", tokens, tokens))
    return jnp.sum(jnp.einsum("nts,nsi->nti", weights, tokens)[:, 0] ** 2, axis=-1)


def differentiate(model, batch):
    return jax.vmap(lambda x: jnp.sum(jax.grad(lambda x: model(x)[0])(x) ** 2))(batch["x"])


APART = {
    "mean of outputs": lambda m, b: jnp.mean(m(b["x"]) ** 2, axis=-1),
    "one output": lambda m, b: m(b["x"])[:, 1],
    "a column": lambda m, b: m(b["x"])[:, :1] - m(-b["x"])[:, 1:],
    "label": pick_label,
    "look-up": lambda m, b: m(m.table(b["y"]))[:, 0],
    "convolution": lambda m, b: jnp.sum(jnp.tanh(m.conv(b["x"][..., None])), axis=(1, 2)),
    "attention": attend,
    "loop": sum_by_loop,
    "remat": lambda m, b: jax.checkpoint(lambda x: m(x)[:, 0])(b["x"]),
    "statistics": lambda m, b: m.last(m.batch_norm(m.first(b["x"])))[:, 0],
    "dropout at rest": lambda m, b: m.last(m.dropout(m.first(b["x"])))[:, 0],
    "derivative": differentiate,
    "branches": lambda m, b: jnp.where(b["x"][:, 0] > 0, m(b["x"])[:, 0], m(-b["x"])[:, 1]),
}
TOGETHER = {
    "centred": lambda m, b: m(b["x"])[:, 0] - jnp.mean(m(b["x"])[:, 0]),
    "over their number": lambda m, b: m(b["x"])[:, 0] / b["x"].shape[0],
    "numbered": lambda m, b: m(b["x"])[:, 0] * jnp.arange(b["x"].shape[0]),
    "reversed": lambda m, b: m(b["x"])[::-1, 0],
    "rolled": lambda m, b: jnp.roll(m(b["x"])[:, 0], 1),
    "shifted": lambda m, b: jax.lax.pad(m(b["x"])[:, 0], 0.0, [(1, -1, 0)]),
    "sorted": lambda m, b: jnp.sort(m(b["x"])[:, 0]),
    "cumulated": lambda m, b: jnp.cumsum(m(b["x"])[:, 0]),
    "permuted": lambda m, b: m(b["x"])[b["y"] % 2, 0],
    "softmax over examples": lambda m, b: jax.nn.softmax(m(b["x"])[:, 0], axis=0),
    "statistics of the batch": lambda m, b: m.in_training(b["x"]),
    "of an array of its own": lambda m, b: m(b["x"])[:, 0] - jnp.linspace(0, 1, EXAMPLES),
    "products of pairs": lambda m, b: (m(b["x"]) @ m(b["x"]).T)[:, 0],
    "a loop over examples": lambda m, b: jax.lax.scan(
        lambda c, x: (c + m(x)[0], c), 0.0, b["x"]
    )[1],
}  # fmt: skip


def make(residual):
    class Given(cx.Constraint):
        def residual(self, model, batch, *, key):
            return residual(model, batch)

    model = Net()
    cx.attach(model, Given(gamma=0.5, placement="update"))
    batch = {
        "x": jax.random.normal(jax.random.key(1), (EXAMPLES, 3)),
        "y": jnp.arange(EXAMPLES) * 5 % 4 // 2,
    }
    return model, nnx.state(model, nnx.Param), batch


def find_route(model, parameters, batch):
    point = Point(cx.compose(model), parameters, jnp.zeros((), int), batch, jax.random.key(0), None)
    return explain_route("auto", point, (EXAMPLES,))


@pytest.mark.parametrize("name", [*APART, *TOGETHER])
def test_only_rows_that_share_no_example_are_taken_apart(name):
    route, reason = find_route(*make({**APART, **TOGETHER}[name]))
    assert (route == "gram") == (name in APART), reason


@pytest.mark.parametrize("name", APART)
def test_rows_that_were_taken_apart_have_the_step_of_their_jacobian(x64, name):
    model, parameters, batch = make(APART[name])
    parameters = jax.tree.map(lambda leaf: leaf.astype(float), parameters)
    nnx.update(model, parameters)
    constraints = cx.compose(model)
    update = jax.tree.map(lambda leaf: 0.01 * jnp.cos(7 * leaf), parameters)
    found = cx.project(update, constraints, parameters, batch=batch)

    flat, unravel = jax.flatten_util.ravel_pytree(parameters)
    u = jax.flatten_util.ravel_pytree(update)[0]

    def rows(flat):
        return constraints.members[0].rows(unravel(flat), batch, jax.random.key(0), None)

    J = jax.jacobian(rows)(flat)
    np.testing.assert_allclose(found.rows["given"], rows(flat), atol=1e-12)
    lengths = np.linalg.norm(J, axis=1)  # rows that contradict each other share by length
    asked = (J @ u + 0.5 * rows(flat)) / lengths
    expected = u - np.linalg.pinv(J / lengths[:, None], rcond=1e-7) @ asked
    moved = jax.flatten_util.ravel_pytree(found.update)[0]
    np.testing.assert_allclose(moved, expected, atol=1e-6 * np.linalg.norm(expected))


def test_rows_that_draw_samples_are_not_taken_apart():
    class Noisy(cx.Constraint):
        def residual(self, model, batch, *, key):
            return model(batch["x"] + jax.random.normal(key, batch["x"].shape))[:, 0]

    model = Net()
    cx.attach(model, Noisy())
    batch = {"x": jnp.ones((EXAMPLES, 3))}
    assert find_route(model, nnx.state(model, nnx.Param), batch)[0] == "iterative"


def test_inequalities_of_single_examples_have_the_step_of_stored_gradients():
    """The same active rows, whether gradients are stored or rows are taken apart."""
    model, parameters, batch = make(APART["one output"])
    bound = cx.AtMost(0.1, of=lambda m, b, key: m(b["x"])[:, 0], placement="twice")
    apart = cx.constrain(optax.adam(0.05), bound, model=model)

    def together(parameters, batch):
        values = cx.compose(bound, model=model)(parameters, batch, model=model)["at-most"]
        return values + 0 * jnp.sum(values)  # depends on all examples, to the eye

    (member,) = cx.compose(together, gamma=1.0).members
    stored = cx.constrain(
        optax.adam(0.05),
        cx.constraints.Composed(
            (type(member)(**{**vars(member), "kind": "inequality", "placement": "twice"}),)
        ),
    )
    gradient = jax.tree.map(lambda leaf: -jnp.ones_like(leaf), parameters)
    updates = [
        optimizer.update(gradient, optimizer.init(parameters), parameters, batch=batch)[0]
        for optimizer in (apart, stored)
    ]
    for one, other in zip(*map(jax.tree.leaves, updates), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


SEVERAL = {
    "outputs": lambda m, b: m(b["x"]),
    "one of several lengths": lambda m, b: m(b["memory"]),
    "two arrays": lambda m, b: {
        "a": m(b["x"]) - b["x"][:, :2],
        "b": jnp.tanh(m.first(b["x"])).reshape(-1, 1, 5)[..., :3],
    },
    "tokens as examples": lambda m, b: m(
        jnp.stack([b["x"], 2 * b["x"]], axis=1).reshape(-1, 3)
    ).reshape(-1, 2, 2),
    "features of a convolution": lambda m, b: jnp.tanh(m.conv(b["x"][..., None])),
    "halves": lambda m, b: jnp.split(m(b["x"]), 2, axis=1)[1] ** 2 + m(b["x"]),
}
MIXED = {
    "halves of the batch": lambda m, b: jnp.concatenate([m(b["x"]), m(-b["x"])]),
    "outputs first": lambda m, b: m(b["x"]).T,
    "every second": lambda m, b: m(jnp.concatenate([b["x"], b["x"]], axis=1).reshape(-1, 3))[::2],
    "two batches": lambda m, b: jnp.sum(m(b["x"])) + m(b["memory"]),
    "outputs centred": lambda m, b: m(b["x"]) - jnp.mean(m(b["x"]), axis=0),
}  # fmt: skip


def make_several(residual):
    model, parameters, batch = make(residual)
    return model, parameters, {**batch, "memory": jnp.cos(batch["x"][:7] * 3)}


@pytest.mark.parametrize("name", [*SEVERAL, *MIXED])
def test_rows_of_an_example_are_the_same_as_together(x64, name):
    """Values, products and the Gram matrix, in the order of the residual; and the route."""
    model, parameters, batch = make_several({**SEVERAL, **MIXED}[name])
    parameters = jax.tree.map(lambda leaf: leaf.astype(float), parameters)
    constraints = cx.compose(model)
    point = Point(constraints, parameters, jnp.zeros((), int), batch, jax.random.key(0), None)
    flat, unravel = jax.flatten_util.ravel_pytree(parameters)

    def rows(flat):
        return constraints.members[0].rows(unravel(flat), batch, jax.random.key(0), None)

    wanted = rows(flat)
    route, reason = explain_route("auto", point, (wanted.size,))
    assert (route == "gram") == (name in SEVERAL), reason
    if route != "gram":
        return
    metric = jax.tree.map(jnp.exp, parameters)
    weights = jax.flatten_util.ravel_pytree(metric)[0]

    @jax.jit
    def find(parameters):
        here = point._replace(parameters=parameters)
        stacked = linearise(here, "auto", (wanted.size,)).jacobian
        return {
            "values": stacked.values,
            "dense": stacked.materialise(parameters),
            "gram": stacked.gram(),
            "gram in a metric": stacked.gram(metric),
            "matvec": stacked.matvec(parameters),
            "rmatvec": jax.flatten_util.ravel_pytree(stacked.rmatvec(jnp.cos(wanted), parameters))[
                0
            ],
        }

    found = find(parameters)
    J = jax.jit(jax.jacobian(rows))(flat)
    reference = {
        "values": wanted,
        "dense": J,
        "gram": J @ J.T,
        "gram in a metric": (J * weights) @ J.T,
        "matvec": J @ flat,
        "rmatvec": jnp.cos(wanted) @ J,
    }
    for key, value in reference.items():
        np.testing.assert_allclose(found[key], value, atol=1e-11, err_msg=key)


def test_smooth_rows_of_points_that_stay_converge_quadratically(x64):
    """With γ = 1, each step is one of Gauss and Newton: errors are squared from step to step."""
    model = MLP((3, 24, 24, 4), rngs=nnx.Rngs(0))
    parameters = jax.tree.map(lambda leaf: leaf.astype(float), nnx.state(model, nnx.Param))
    nnx.update(model, parameters)

    class Fit(cx.Constraint):
        def residual(self, model, batch, *, key):
            return model(batch["x"]) - batch["y"]

    cx.attach(model, Fit(gamma=1.0, placement="update"))
    batch = {"x": jnp.cos(jnp.arange(24.0).reshape(8, 3) ** 2), "spare": jnp.ones(3)}
    batch["y"] = model(batch["x"]) + 0.3 * jnp.sin(jnp.arange(32.0)).reshape(8, 4)
    constraints = cx.compose(model)

    @jax.jit
    def step(parameters):
        nothing = jax.tree.map(jnp.zeros_like, parameters)
        found = cx.project(nothing, constraints, parameters, batch=batch)
        moved = jax.tree.map(jnp.add, parameters, found.update)
        return moved, jnp.linalg.norm(found.rows["fit"])

    errors = []
    for _ in range(7):
        parameters, error = step(parameters)
        errors.append(float(error))
    assert errors[-1] < 1e-12
    near = [(one, two) for one, two in itertools.pairwise(errors) if 1e-5 < one < 1]
    assert len(near) >= 2, errors
    assert all(two < one**2 / 10 for one, two in near), errors
