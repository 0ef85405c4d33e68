"""From the default call, every optimizer ends at the solution of the constrained problem."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.optimize
from flax import nnx

import constrainx as cx
from constrainx.constraints import Composed, Member

STEPS = 3000
SIZE = 12
_rng = np.random.default_rng(0)
A, B = _rng.normal(size=(20, SIZE)), 3 * _rng.normal(size=20)
C, D = _rng.normal(size=(2, SIZE)), _rng.normal(size=2)
E, F = _rng.normal(size=(5, SIZE)), -0.3 * np.ones(5)


def decay(rate):
    return optax.cosine_decay_schedule(rate, STEPS)


OPTIMIZERS = {
    "sgd": optax.sgd(3e-3),
    "momentum": optax.sgd(1e-3, momentum=0.9),
    "nesterov": optax.sgd(1e-3, momentum=0.9, nesterov=True),
    "adam": optax.adam(decay(0.03)),
    "adamw": optax.adamw(decay(0.03), weight_decay=0.0),
    "rmsprop": optax.rmsprop(decay(0.03)),
    "adabelief": optax.adabelief(decay(0.03)),
    "adafactor": optax.adafactor(decay(0.03)),
    "lion": optax.lion(decay(0.01)),
    "muon": optax.contrib.muon(decay(0.03)),
}


def loss(x):
    return 0.5 * jnp.sum(jnp.square(A @ x - B))


def as_inequality(function):
    """A function of the parameters alone, function ≤ 0."""

    def rows(p, batch, key, model):
        return function(p)

    return Member("at-most", rows, 1.0, kind="inequality")


def linear_equalities(x):
    return C @ x - D


def linear_inequalities(x):
    return E @ x - F


def sphere(x):
    return jnp.sum(x**2) - 1.0


CONSTRAINTS = {
    "equalities": (linear_equalities, None),
    "inequalities": (None, linear_inequalities),
    "both": (linear_equalities, linear_inequalities),
    "sphere": (sphere, None),
}


def compose(equality, inequality):
    members = []
    if equality is not None:
        members += cx.compose(equality, gamma=1.0).members
    if inequality is not None:
        members.append(as_inequality(inequality))
    return Composed(tuple(members))


@functools.cache
def solve_exactly(name):
    """The optimal loss."""
    if name == "sphere":
        found = scipy.optimize.minimize(
            lambda x: 0.5 * np.sum(np.square(A @ x - B)),
            np.full(SIZE, 0.1),
            jac=lambda x: A.T @ (A @ x - B),
            constraints={"type": "eq", "fun": lambda x: np.atleast_1d(sphere(x))},
            method="SLSQP",
            options={"ftol": 1e-15, "maxiter": 2000},
        )
        assert found.success
        return found.fun
    equality, inequality = CONSTRAINTS[name]
    J, d = (C, D) if equality is not None else (np.zeros((0, SIZE)), np.zeros(0))
    others = range(len(F)) if inequality is not None else ()
    candidates = []
    for active in itertools.chain(*(itertools.combinations(others, n) for n in range(len(F) + 1))):
        rows, right = np.concatenate([J, E[list(active)]]), np.concatenate([d, F[list(active)]])
        system = np.block([[A.T @ A, rows.T], [rows, np.zeros((len(rows), len(rows)))]])
        solution = np.linalg.solve(system, np.concatenate([A.T @ B, right]))
        x, multipliers = solution[:SIZE], solution[SIZE + len(J) :]
        feasible = inequality is None or np.all(E @ x <= F + 1e-9)
        if feasible and np.all(multipliers >= -1e-9):
            candidates.append(0.5 * np.sum(np.square(A @ x - B)))
    return min(candidates)


def train(optimizer, *, start=0.1, noise=0.0, steps=STEPS):
    """The last parameters, and the largest violation over the last hundred steps."""

    def step(carry, key):
        x, state = carry
        gradient = jax.grad(loss)(x) + noise * jax.random.normal(key, x.shape)
        updates, state = optimizer.update(gradient, state, x)
        return (optax.apply_updates(x, updates), state), None

    x = jnp.full(SIZE, start)
    keys = jax.random.split(jax.random.key(0), steps)
    run = jax.jit(lambda x: jax.lax.scan(step, (x, optimizer.init(x)), keys)[0][0])
    return run(x)


def measure(x, name):
    """How far the loss is above its optimum, relatively, and the largest violation."""
    equality, inequality = CONSTRAINTS[name]
    violations = [0.0]
    if equality is not None:
        violations.append(float(jnp.max(jnp.abs(equality(x)))))
    if inequality is not None:
        violations.append(float(jnp.max(inequality(x))))
    best = solve_exactly(name)
    return float(loss(x)) / best - 1, max(violations)


@pytest.mark.parametrize("name", CONSTRAINTS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_reaches_the_constrained_optimum(x64, optimizer, name):
    x = train(cx.constrain(OPTIMIZERS[optimizer], compose(*CONSTRAINTS[name])))
    above, violation = measure(x, name)
    # Where updates do not shrink with the gradient, corners are approached in steps of the rate.
    coarse = optimizer in ("lion", "rmsprop") and CONSTRAINTS[name][1] is not None
    assert abs(above) < (1e-3 if coarse else 1e-5)
    assert violation < 1e-6


def test_projecting_the_update_alone_misses_the_constrained_optimum(x64):
    """The reason for projecting twice: the fixed points of Adam's projected update are others."""
    optimizer = cx.constrain(
        OPTIMIZERS["adam"],
        compose(*CONSTRAINTS["equalities"]),
        method=cx.NullSpace(placement="update"),
    )
    above, violation = measure(train(optimizer), "equalities")
    assert above > 1e-3
    assert violation < 1e-6


@pytest.mark.parametrize("optimizer", ["adam", "lion", "adafactor"])
def test_noise_in_the_gradient_does_not_move_the_optimum(x64, optimizer):
    x = train(cx.constrain(OPTIMIZERS[optimizer], compose(*CONSTRAINTS["both"])), noise=1.0)
    above, violation = measure(x, "both")
    assert abs(above) < 1e-3
    assert violation < 1e-6


def _wrap_constrained(name):
    """The constrained optimizer inside of Optax's combinators."""
    constrained = cx.constrain(optax.adam(decay(0.03)), compose(*CONSTRAINTS["equalities"]))
    return {
        "chain": optax.chain(optax.clip_by_global_norm(1e3), constrained),
        "apply_if_finite": optax.apply_if_finite(constrained, 3),
        "masked": cx.constrain(
            optax.masked(optax.adam(decay(0.03)), True), compose(*CONSTRAINTS["equalities"])
        ),
        "inject_hyperparams": cx.constrain(
            optax.inject_hyperparams(optax.adam)(learning_rate=decay(0.03)),
            compose(*CONSTRAINTS["equalities"]),
        ),
        "multi_transform": cx.constrain(
            optax.multi_transform({"all": optax.adam(decay(0.03))}, "all"),
            compose(*CONSTRAINTS["equalities"]),
        ),
        "multi_steps": optax.MultiSteps(constrained, every_k_schedule=2),
    }[name]


@pytest.mark.parametrize(
    "name",
    ["chain", "apply_if_finite", "masked", "inject_hyperparams", "multi_transform", "multi_steps"],
)
def test_combinators_of_optax_keep_the_optimum(x64, name):
    steps = 2 * STEPS if name == "multi_steps" else STEPS
    above, violation = measure(train(_wrap_constrained(name), steps=steps), "equalities")
    assert abs(above) < 1e-5
    assert violation < 1e-6


def test_rows_that_are_drawn_anew_are_projected_in_the_gradient_and_others_twice():
    """With Adam, only the rows that are projected in the update obey J u = −γ c exactly."""

    def fixed(p):
        return p[0] ** 2 + p[1] - 1.0

    def fresh(p, batch):
        return jnp.sum(batch * p) - 0.5

    optimizer = cx.constrain(optax.adam(0.1), (fixed, fresh), gamma=0.5)
    p, batch = jnp.array([0.3, -0.2, 0.8]), jnp.array([1.0, 2.0, -1.0])
    gradient = jnp.array([1.0, -2.0, 0.3])
    updates, state = jax.jit(optimizer.update)(gradient, optimizer.init(p), p, batch=batch)
    _, moved = jax.jvp(fixed, (p,), (updates,))
    np.testing.assert_allclose(moved, -0.5 * fixed(p), rtol=1e-5)
    _, drawn = jax.jvp(lambda p: fresh(p, batch), (p,), (updates,))
    assert abs(drawn + 0.5 * fresh(p, batch)) > 1e-3
    # What goes into Adam obeys both: the gradient's rows are pulled, those of the other are not.
    projected, _ = cx.constrain(optax.sgd(1.0), (fixed, fresh), gamma=0.5).update(
        gradient, cx.constrain(optax.sgd(1.0), (fixed, fresh)).init(p), p, batch=batch
    )
    _, moved = jax.jvp(fixed, (p,), (projected,))
    np.testing.assert_allclose(moved, -0.5 * fixed(p), rtol=1e-5)
    assert all(bool(report.resolved) for report in cx.reports(state).values())


def test_the_placement_of_a_constraint_or_of_the_method_wins_over_the_default():
    class Sum(cx.Constraint):
        def residual(self, model, batch, *, key):
            return jnp.sum(model.kernel[...]) + jnp.sum(batch["x"])

    model = nnx.Linear(2, 2, use_bias=False, rngs=nnx.Rngs(0))
    batch, params = {"x": jnp.ones(3)}, nnx.state(model, nnx.Param)
    gradient = jax.tree.map(lambda leaf: jnp.cos(3 * leaf), params)

    def obeys(constraint, **options):
        optimizer = cx.constrain(optax.adam(0.1), constraint, model=model, **options)
        updates, _ = optimizer.update(gradient, optimizer.init(params), params, batch=batch)
        total = sum(jnp.sum(leaf) for leaf in jax.tree.leaves(updates))
        residual = constraint.residual(model, batch, key=None)
        return bool(jnp.allclose(total, -0.5 * residual, rtol=1e-4))

    assert not obeys(Sum(gamma=0.5))
    assert obeys(Sum(gamma=0.5, placement="twice"))
    assert obeys(Sum(gamma=0.5, placement="update"))
    assert obeys(Sum(gamma=0.5), method=cx.NullSpace(placement="twice"))
    assert not obeys(Sum(gamma=0.5, placement="twice"), method=cx.NullSpace(placement="gradient"))
