"""A user's own solver: a frozen dataclass with one method."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import constrainx as cx
from tests.linalg import dense


@dataclasses.dataclass(frozen=True)
class Landweber:
    """Gradient descent: slow, but a whole solver in ten lines."""

    step: float = 1.0
    iterations: int = 4000

    def solve(self, problem):
        def body(_, x):
            residual = jax.tree.map(jnp.subtract, problem.b, problem.operator.matvec(x))
            descent = problem.operator.rmatvec(residual)
            return jax.tree.map(lambda a, d: a + self.step * (d - problem.damp**2 * a), x, descent)

        start = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), problem.operator.columns)
        x = jax.lax.fori_loop(0, self.iterations, body, start)
        nan = jnp.nan
        return x, cx.Info(True, cx.Reason.LEAST_SQUARES, self.iterations, nan, nan, nan)


@dataclasses.dataclass(frozen=True)
class NotEvenASolution:
    what: str

    def solve(self, problem):
        x, info = cx.LSMR().solve(problem)
        return {"shape": (x[:1], info), "info": (x, {"converged": True})}[self.what]


@pytest.mark.parametrize("damp", [0.0, 0.4])
@pytest.mark.parametrize("index", [0, 2, 4], ids=["tall", "wide", "tall-deficient"])
def test_lstsq_differentiates_through_a_custom_solver(x64, index, damp):
    assert isinstance(Landweber(), cx.Solver)
    case = dense.CASES[index]
    A, L, R, b = case.problem()

    def ours(t):
        moved = dense.moved(jnp.asarray(A), jnp.asarray(L), jnp.asarray(R), t)
        x, _ = cx.lstsq(
            lambda v: moved @ v, b, like=jnp.zeros(case.columns), damp=damp, solver=Landweber(0.5)
        )
        return jnp.sum(jnp.sin(x))

    def reference(t):
        return np.sum(np.sin(dense.solve(dense.moved(A, L, R, t), b, damp)))

    value, gradient = jax.jit(jax.value_and_grad(ours))(0.1)
    np.testing.assert_allclose(value, reference(0.1), rtol=1e-8)
    np.testing.assert_allclose(gradient, dense.derivative(reference, 0.1), rtol=1e-6)
    _, tangent = jax.jvp(ours, (0.1,), (1.0,))
    np.testing.assert_allclose(tangent, gradient, rtol=1e-6)


@pytest.mark.parametrize(
    ("what", "message"), [("shape", r"shaped like.*float32\[3\]"), ("info", "Info.*got dict")]
)
def test_a_wrong_return_value_is_an_error(what, message):
    with pytest.raises(TypeError, match=message):
        cx.lstsq(lambda v: v, jnp.ones(3), like=jnp.zeros(3), solver=NotEvenASolution(what))


def test_a_solver_must_be_hashable():
    @dataclasses.dataclass
    class Mutable:
        rtol: float = 1e-6

        def solve(self, problem):
            return cx.LSMR(rtol=self.rtol).solve(problem)

    with pytest.raises(TypeError, match="frozen=True"):
        cx.lstsq(lambda v: v, jnp.ones(3), like=jnp.zeros(3), solver=Mutable())
