"""Rows of norms that may fall faster than γ asks."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.optimize

import constrainx as cx
from constrainx.constraints._compose import Composed

CURVATURE = np.array([1.0, 4.0, 25.0])
LINEAR = np.array([1.0, -2.0, 5.0])
NORMAL = np.array([1.0, 2.0, -1.0])


def compose(function, **options):
    (member,) = cx.compose(function).members
    return Composed((dataclasses.replace(member, **options),))


def off_the_plane(p):
    return jnp.abs(NORMAL @ p - 1.0)


def below(p):
    return p[1] + 0.1


def loss(p):
    return 0.5 * CURVATURE @ p**2 - LINEAR @ p


def test_an_update_that_lowers_a_norm_by_more_is_left_as_it_is(x64):
    point = jnp.array([2.0, 0.0, 0.5])
    fast, slow = -0.1 * NORMAL, -0.01 * NORMAL
    both = [compose(off_the_plane, gamma=0.2, one_sided=one) for one in (False, True)]
    two, one = (cx.project(fast, c, point).update for c in both)
    np.testing.assert_array_equal(one, fast)
    np.testing.assert_allclose(NORMAL @ two, -0.2 * 0.5)  # it is held up
    two, one = (cx.project(slow, c, point) for c in both)
    np.testing.assert_allclose(one.update, two.update, atol=1e-14)
    assert one.reports["off_the_plane"].resolved


@pytest.mark.parametrize(
    ("name", "placement", "bounded"),
    [
        ("sgd", "gradient", True),
        ("sgd", "twice", True),
        ("adam", "gradient", True),
        ("adam", "twice", False),
    ],
)
def test_training_ends_at_the_constrained_optimum(name, placement, bounded, x64):
    """Where the multiplier of the smooth equation may have either sign."""
    steps = 1500
    rate = optax.cosine_decay_schedule({"sgd": 0.03, "adam": 0.05}[name], steps)
    plane = compose(off_the_plane, gamma=0.5, one_sided=True, placement=placement)
    room = compose(below, gamma=1.0, kind="inequality", placement=placement)
    constraints = Composed(plane.members + (room.members if bounded else ()))
    optimizer = cx.constrain(getattr(optax, name)(rate), constraints)

    def train(start):
        def step(carry, _):
            p, state = carry
            updates, state = optimizer.update(jax.grad(loss)(p), state, p)
            return (optax.apply_updates(p, updates), state), None

        (p, _), _ = jax.lax.scan(step, (start, optimizer.init(start)), length=steps)
        return p

    # From both sides of the plane.
    ends = jax.jit(jax.vmap(train))(jnp.array([[2.0, 0.0, 0.5], [-1.0, 0.3, 0.5]]))
    best = scipy.optimize.minimize(
        loss,
        np.zeros(3),
        jac=lambda p: CURVATURE * p - LINEAR,
        method="SLSQP",
        constraints=[
            {"type": "eq", "fun": lambda p: NORMAL @ p - 1.0},
            *([{"type": "ineq", "fun": lambda p: -0.1 - p[1]}] if bounded else []),
        ],
        options={"ftol": 1e-14},
    )
    for end in ends:
        np.testing.assert_allclose(end, best.x, atol=5e-3)


def test_rows_of_either_sign_are_refused():
    for reduce in ("none", "mean", cx.Sketch(4)):
        with pytest.raises(ValueError, match="only rows that are never negative"):
            cx.UnitNorm(lambda m: m, axis=0, reduce=reduce, one_sided=True)
    assert cx.UnitNorm(lambda m: m, axis=0, reduce="rms", one_sided=True).is_one_sided
