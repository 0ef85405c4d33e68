"""What a solve and its gradient cost: solves, memory, and work inside the loop."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import constrainx as cx
from constrainx.linalg._primitive import lstsq_p
from tests.linalg import dense


def primitives(jaxpr):
    """All equations, including those of nested jaxprs."""
    for equation in jaxpr.eqns:
        yield equation
        params = list(equation.params.values())
        if equation.primitive.name == "custom_linear_solve":  # runs this, the rest is for its rules
            params = [equation.params["jaxprs"].solve]
        for inner in jax.tree.leaves(params, is_leaf=lambda leaf: hasattr(leaf, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from primitives(inner)


def count_solves(function, *args):
    closed = jax.make_jaxpr(function)(*args)
    return sum(equation.primitive is lstsq_p for equation in primitives(closed.jaxpr))


@pytest.mark.parametrize(
    ("shape", "damp", "full_rank", "further"),
    [
        ((6, 3), 0.0, False, 3),
        ((6, 3), 0.0, True, 2),
        ((3, 6), 0.0, False, 3),
        ((3, 6), 0.0, True, 2),
        ((4, 4), 0.0, True, 1),
        ((6, 3), 0.5, False, 5),  # two of which end at once unless r is small
        ((6, 3), 0.5, True, 2),
        ((3, 6), 0.5, False, 3),
        ((3, 6), 0.5, True, 2),
    ],
)
def test_a_gradient_takes_few_further_solves(shape, damp, full_rank, further):
    def loss(A, b):
        x, _ = cx.lstsq(
            lambda v: A @ v, b, like=jnp.zeros(shape[1]), damp=damp, full_rank=full_rank
        )
        return jnp.sum(x**2)

    A = jnp.asarray(dense.matrix(*shape), jnp.float32)
    assert count_solves(jax.grad(loss), A, jnp.ones(shape[0])) == 1 + further
    assert count_solves(jax.grad(loss, argnums=1), A, jnp.ones(shape[0])) == 2


def test_memory_does_not_grow_with_the_iterations():
    A = jnp.asarray(dense.matrix(300, 200, condition=1e3), jnp.float32)

    def memory(iterations):
        solver = cx.LSMR(rtol=0.0, condition_limit=float("inf"), max_iterations=iterations)

        def loss(A, b):
            x, _ = cx.lstsq(lambda v: A @ v, b, like=jnp.zeros(200), solver=solver)
            return jnp.sum(x**2)

        lowered = jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).lower(A, jnp.ones(300))
        return lowered.compile().memory_analysis().temp_size_in_bytes

    assert memory(10) == memory(1_000)


def test_the_forward_pass_is_not_in_the_loop():
    """A Jacobian-vector product linearises outside: no tanh in the body of the while loop."""
    weights = jnp.asarray(np.random.default_rng(0).normal(size=(8, 8)), jnp.float32)

    def network(p):
        return jnp.tanh(weights @ jnp.tanh(weights @ p))

    def solve(p):
        return cx.lstsq(lambda v: jax.jvp(network, (p,), (v,))[1], p, like=p)[0]

    text = jax.jit(solve).lower(jnp.ones(8)).as_text()
    assert text.count("stablehlo.while") == 1
    before, after = text.split("stablehlo.while")
    assert "tanh" in before
    assert "tanh" not in after


def test_calls_outside_jit_compile_once():
    A = jnp.asarray(dense.matrix(5, 3), jnp.float32)

    def solve(scale):
        return cx.lstsq(lambda v: scale * (A @ v), jnp.ones(5), like=jnp.zeros(3))[0]

    first = solve(1.0)
    with jax.log_compiles(False):
        compiled = []
        jax.monitoring.register_event_duration_secs_listener(
            lambda event, duration, **_: compiled.append(event)
        )
        try:
            second = solve(2.0)
        finally:
            jax.monitoring.clear_event_listeners()
    assert not [event for event in compiled if "backend_compile" in event]
    np.testing.assert_allclose(first, 2 * second, rtol=1e-5)
