"""Values and gradients against lineax, an independent implementation."""

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest

import constrainx as cx
from tests.linalg import dense


@pytest.mark.parametrize("index", [0, 2, 3], ids=["tall", "wide", "square"])
def test_values_and_gradients_agree_with_lineax(x64, index):
    case = dense.CASES[index]
    A, _, _, b = case.problem()
    weights = jnp.asarray(np.random.default_rng(0).normal(size=case.columns))

    def theirs(A, b):
        solution = lx.linear_solve(lx.MatrixLinearOperator(A), b, solver=lx.SVD())
        return weights @ jnp.sin(solution.value)

    def ours(A, b):
        x, _ = cx.lstsq(lambda v: A @ v, b, like=weights, solver=cx.LSMR(rtol=1e-13))
        return weights @ jnp.sin(x)

    arguments = (jnp.asarray(A), jnp.asarray(b))
    np.testing.assert_allclose(ours(*arguments), theirs(*arguments), rtol=1e-9)
    for mine, other in zip(
        jax.grad(ours, argnums=(0, 1))(*arguments),
        jax.grad(theirs, argnums=(0, 1))(*arguments),
        strict=True,
    ):
        np.testing.assert_allclose(mine, other, rtol=1e-7, atol=1e-9)
