"""Penalty and augmented Lagrangian on the same constraints."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import constrainx as cx
from constrainx.step import Taken, report_rows
from tests.trainers.problems import assert_same_state, trainer, unit_hidden

GOAL = jnp.array([2.0, 1.0])


def circle(p):
    return jnp.sum(p**2) - 1.0


def train(method, **options):
    return train_with_state(method, **options)[0]


def train_with_state(method, *, steps=3000, constraint=circle, goal=GOAL, batch=None):
    optimizer = cx.constrain(optax.sgd(0.02), constraint, gamma=0.5, method=method)

    def step(carry, _):
        p, state = carry
        updates, state = optimizer.update(p - goal, state, p, batch=batch)
        return (optax.apply_updates(p, updates), state), None

    start = jnp.resize(jnp.array([0.3, 0.8]), goal.shape)
    return jax.jit(lambda: jax.lax.scan(step, (start, optimizer.init(start)), length=steps)[0])()


def test_only_the_null_space_and_the_lagrangian_end_on_the_curve(x64):
    solution = GOAL / jnp.linalg.norm(GOAL)
    np.testing.assert_allclose(train("none"), GOAL, atol=1e-6)
    np.testing.assert_allclose(train("nullspace"), solution, atol=1e-6)
    np.testing.assert_allclose(train("lagrangian"), solution, atol=1e-3)
    violations = [abs(circle(train(cx.Penalty(w)))) for w in (0.3, 1.0, 3.0)]
    assert violations[0] > violations[1] > violations[2] > 1e-2


@pytest.mark.parametrize("weight", [0.5, 2.0])
def test_penalty_ends_at_the_minimiser_of_the_penalised_loss(x64, weight):
    p = train(cx.Penalty(weight))
    gradient = jax.grad(lambda p: 0.5 * jnp.sum((p - GOAL) ** 2) + 0.5 * weight * circle(p) ** 2)(p)
    np.testing.assert_allclose(gradient, 0, atol=1e-8)


def test_methods_respect_inequalities(x64):
    inside = cx.AtMost(4.0, of=lambda m, batch, key: jnp.sum(m**2))
    member = cx.compose(lambda p: jnp.sum(p**2) - 4.0).members[0]
    constraint = cx.Composed((type(member)(**{**vars(member), "kind": inside.kind}),))
    np.testing.assert_allclose(
        train("lagrangian", constraint=constraint), 2 * GOAL / jnp.linalg.norm(GOAL), atol=1e-3
    )
    far = cx.Composed(
        (type(member)(**{**vars(member), "kind": inside.kind,
                         "function": lambda p, *_: jnp.sum(p**2)[None] - 100.0}),)
    )  # fmt: skip
    for method in ("penalty", "lagrangian", "nullspace"):
        np.testing.assert_allclose(train(method, constraint=far), GOAL, atol=1e-6)


def often(p):
    return jnp.repeat(circle(p), 64)


@pytest.mark.parametrize("method", [cx.Penalty(2.0), cx.Lagrangian(2.0, rate=0.5)], ids=str)
def test_a_weight_does_not_depend_on_the_number_of_rows(x64, method):
    once, repeated = (train(method, constraint=c, steps=200) for c in (circle, often))
    np.testing.assert_allclose(repeated, once, rtol=1e-12)


def test_each_constraint_has_a_mean_of_its_own(x64):
    p = train(cx.Penalty(2.0), constraint=(often, lambda p: p[:1] - 3))

    def penalised(p):
        return 0.5 * jnp.sum((p - GOAL) ** 2) + circle(p) ** 2 + (p[0] - 3) ** 2

    np.testing.assert_allclose(jax.grad(penalised)(p), 0, atol=1e-8)


A = jnp.array([[1.0, 0.5, 0.0, -0.5], [0.0, 1.0, 0.5, 0.2], [0.3, 0.0, 1.0, 0.1]])
B = jnp.array([0.5, -1.0, 0.3])
FAR = jnp.array([2.0, 1.0, -1.0, 0.5])


def planes(p):
    return A @ p - B


@pytest.mark.parametrize("rate", [None, 3.0])
def test_multipliers_over_the_number_of_rows_are_those_of_the_problem(x64, rate):
    method = cx.Lagrangian(6.0, rate=rate)
    p, state = train_with_state(method, constraint=planes, goal=FAR, steps=4000)
    # ∇f + Aᵀμ = 0 and A p = b.
    exact = jnp.linalg.solve(A @ A.T, A @ FAR - B)
    np.testing.assert_allclose(p, FAR - A.T @ exact, atol=1e-6)
    found = state.constraints.multipliers["planes"] / len(B)
    np.testing.assert_allclose(found, exact, atol=1e-6)


def test_a_shared_multiplier_is_that_of_the_mean(x64):
    def rows(p, batch):
        return batch @ p - 1.0

    p, state = train_with_state(
        # Without the quadratic term the mean alone is brought to zero.
        cx.Lagrangian(0.0, rate=1.0), constraint=rows, goal=FAR, batch=A, steps=6000
    )  # fmt: skip
    mean = jnp.mean(A, axis=0)
    exact = (mean @ FAR - 1.0) / (mean @ mean)
    assert state.constraints.multipliers["rows"].shape == ()
    np.testing.assert_allclose(state.constraints.multipliers["rows"], exact, rtol=1e-6)
    np.testing.assert_allclose(p, FAR - exact * mean, atol=1e-6)


def test_an_inequality_without_a_quadratic_term(x64):
    member = cx.compose(lambda p: jnp.sum(p) - 1.0).members[0]
    inside = cx.Composed((dataclasses.replace(member, kind="inequality"),))
    p, state = train_with_state(cx.Lagrangian(0.0, rate=0.01), constraint=inside, steps=6000)
    np.testing.assert_allclose(p, GOAL - 1.0, atol=1e-6)
    np.testing.assert_allclose(state.constraints.multipliers["constraint"], 1.0, atol=1e-6)


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf"), np.float32(-1), "one", True])
@pytest.mark.parametrize(
    ("build", "argument"),
    [
        (lambda v: cx.Penalty(v), "`Penalty(weight=...)`"),
        (lambda v: cx.Lagrangian(v), "`Lagrangian(weight=...)`"),
        (lambda v: cx.Lagrangian(rate=v), "`Lagrangian(rate=...)`"),
        (lambda v: cx.compose(circle, gamma=v), "`gamma=...`"),
        (lambda v: cx.nullspace(circle, gamma=v), "`gamma=...`"),
        (lambda v: cx.constrain(optax.sgd(1.0), circle, gamma=v), "`gamma=...`"),
        (lambda v: cx.constrain(optax.sgd(1.0), circle, gamma=v, method="none"), "`gamma=...`"),
    ],
)
def test_numbers_that_make_no_sense_are_refused_at_once(build, argument, value):
    with pytest.raises(ValueError, match=re.escape(f"{argument} must be a finite number")):
        build(value)


def test_numbers_may_come_from_numpy():
    assert cx.Penalty(np.float32(0.5)) == cx.Penalty(0.5)
    assert cx.Lagrangian(np.float32(0.5), np.float32(2)) == cx.Lagrangian(0.5, 2.0)
    assert cx.compose(circle, gamma=np.float32(0.5)).members[0].gamma == 0.5
    cx.constrain(optax.sgd(1.0), circle, gamma=np.float32(0.5))


class Sum(cx.Constraint):
    def residual(self, model, batch, *, key):
        return jnp.sum(model.kernel[...])


class Below(Sum):
    kind = "inequality"


def bound(constraint, **options):
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    return cx.constrain(optax.sgd(1.0), constraint, model=model, **options)


@pytest.mark.parametrize(
    "build",
    [
        lambda: cx.constrain(optax.sgd(1.0), circle, gamma=2.5,
                             method=cx.NullSpace(placement="twice")),
        lambda: cx.constrain(optax.sgd(1.0), circle, gamma=np.float32(2.5),
                             method=cx.NullSpace(metric="optimizer")),
        lambda: bound(Sum(gamma=2.5, placement="update")),
        lambda: cx.project(jnp.ones(2), cx.compose(circle, gamma=2.5), jnp.ones(2)),
    ],
)  # fmt: skip
def test_a_gamma_that_overshoots_by_more_than_it_corrects_is_refused(build):
    with pytest.raises(ValueError, match=r"`gamma=2.5` of constraint .* 1 − γ = -1.5"):
        build()


def test_a_gamma_that_overshoots_is_refused_when_the_rows_are_known():
    optimizer = cx.constrain(optax.sgd(1.0), circle, gamma=2.5)
    p = jnp.ones(2)
    state = optimizer.init(p)
    with pytest.raises(ValueError, match="placement='twice'"):
        jax.jit(optimizer.update)(p, state, p)


def test_a_large_gamma_is_fine_where_it_does_not_overshoot():
    p = jnp.ones(2)
    for optimizer in (
        cx.constrain(optax.sgd(1.0), circle, gamma=2.0),
        cx.constrain(optax.sgd(0.1), circle, gamma=5.0, method=cx.NullSpace(placement="gradient")),
        cx.constrain(optax.sgd(1.0), circle, gamma=optax.constant_schedule(2.5)),
        cx.constrain(optax.sgd(1.0), circle, gamma=2.5, method="penalty"),
        cx.nullspace(circle, gamma=5.0),
    ):
        optimizer.update(p, optimizer.init(p), p)
    bound(Sum(gamma=5.0, placement="gradient"))
    bound(Sum(gamma=5.0, placement="update"), method=cx.NullSpace(placement="gradient"))
    bound(Below(gamma=5.0, placement="update"))


def test_the_share_of_the_gradient_that_was_projected_out():
    def first(p):
        return p[0]

    p, gradient = jnp.array([0.0, 1.0]), jnp.array([3.0, 4.0])
    for method, share in [("nullspace", 0.36), (cx.NullSpace(placement="gradient"), 0.36),
                          (cx.NullSpace(placement="update"), 0.5), ("penalty", 0.0)]:  # fmt: skip
        optimizer = cx.constrain(optax.adam(0.1), first, method=method)
        _, state = optimizer.update(gradient, optimizer.init(p), p)
        np.testing.assert_allclose(state.constraints.removed, share, rtol=1e-6)
    _, state = optimizer.update(0 * gradient, optimizer.init(p), p)
    assert state.constraints.removed == 0


@dataclasses.dataclass(frozen=True)
class CountingPenalty:
    """A method of a user's own: a penalty whose weight grows with the steps that it remembers."""

    weight: float

    def init(self, constraints, parameters):
        return {"taken": jnp.zeros((), jnp.int32)}

    def take(self, point, gradients, optimize, multipliers):
        taken = multipliers["taken"] + 1

        def penalty(p):
            return 0.5 * self.weight * taken * sum(jnp.sum(c**2) for c in point.rows(p).values())

        extra = jax.grad(penalty)(point.parameters)
        update, state = optimize(jax.tree.map(jnp.add, gradients, extra))
        reports = report_rows(point, point.rows(point.parameters))
        return Taken(update, state, reports, multipliers={"taken": taken})


def test_a_users_method_trains_in_optax(x64):
    p = train(CountingPenalty(0.02), steps=400)
    assert abs(circle(p)) < abs(circle(train("none", steps=400)))
    np.testing.assert_allclose(jnp.cross(p, GOAL), 0, atol=1e-2)


def test_a_users_method_trains_in_the_trainer_and_resumes(tmp_path):
    options = {"method": CountingPenalty(0.02), "constraints": [unit_hidden()], "save_every": 2}
    straight = trainer(run=tmp_path / "run", steps=4, **options)
    straight.fit()
    assert int(straight.state.constraints.multipliers["taken"]) == 4
    resumed = trainer(run=tmp_path / "run", steps=4, **options)
    resumed.restore(2)
    assert int(resumed.state.constraints.multipliers["taken"]) == 2
    resumed.fit()
    assert_same_state(resumed.state, straight.state)


class EqualitiesOnly(CountingPenalty):
    def check(self, constraints):
        if any(member.kind == "inequality" for member in constraints):
            raise cx.UserError("no inequalities, please")


def test_a_users_method_may_refuse_constraints_when_it_is_given():
    with pytest.raises(cx.UserError, match="no inequalities"):
        bound(Below(), method=EqualitiesOnly(1.0))
    with pytest.raises(cx.UserError, match="no inequalities"):
        trainer(method=EqualitiesOnly(1.0), constraints=[cx.AtMost(1.0, of=lambda m, b, k: 0.0)])
    bound(Sum(), method=EqualitiesOnly(1.0))


def test_what_is_not_a_method_is_refused_when_it_is_given():
    with pytest.raises(TypeError, match=r"`Trainer\(method=...\)`.*`init` and `take`"):
        trainer(method=3)


@pytest.mark.parametrize("solver", ["gram", cx.LSMR(rtol=1e-6)], ids=["gram", "LSMR"])
@pytest.mark.parametrize("placement", ["gradient", "twice", "update"])
def test_the_share_that_was_removed_is_that_of_the_norms(placement, solver):
    rows = jax.random.normal(jax.random.key(0), (3, 10))
    gradient = jax.random.normal(jax.random.key(1), (10,))
    method = cx.NullSpace(placement=placement, solver=solver)
    optimizer = cx.constrain(optax.sgd(1.0), lambda p: rows @ p, method=method)
    parameters = jnp.zeros(10)  # on the constraint, where there is no pull
    _, state = optimizer.update(gradient, optimizer.init(parameters), parameters)
    inside = jnp.linalg.pinv(rows) @ (rows @ gradient)
    expected = jnp.sum(inside**2) / jnp.sum(gradient**2)
    np.testing.assert_allclose(state.constraints.removed, expected, rtol=1e-4)


@pytest.mark.parametrize("placement", ["gradient", "twice", "update"])
def test_a_constraint_that_starts_late_acts_from_that_step_on(placement):
    rows = jax.random.normal(jax.random.key(0), (3, 10))
    gradient = jax.random.normal(jax.random.key(1), (10,))
    (member,) = cx.compose(lambda p: rows @ p).members
    late = cx.Composed((dataclasses.replace(member, start=1),))
    optimizer = cx.constrain(optax.sgd(1.0), late, method=cx.NullSpace(placement=placement))
    take = jax.jit(optimizer.update)
    parameters = jnp.zeros(10)
    update, state = take(gradient, optimizer.init(parameters), parameters)
    np.testing.assert_array_equal(update, -gradient)
    assert state.constraints.removed == 0
    update, state = take(gradient, state, parameters)
    inside = jnp.linalg.pinv(rows) @ (rows @ gradient)
    np.testing.assert_allclose(update, inside - gradient, atol=1e-5)
    expected = jnp.sum(inside**2) / jnp.sum(gradient**2)
    np.testing.assert_allclose(state.constraints.removed, expected, rtol=1e-4)
