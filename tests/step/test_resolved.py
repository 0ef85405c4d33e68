"""Whether a step did what was asked is judged row by row, whatever the units of the others."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import constrainx as cx

SOLVERS = {"gram": "gram", "lsmr": cx.LSMR(rtol=1e-5), "inexact": "auto"}
SCALES = (1e-4, 1.0, 1e4)


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("apart", [False, True], ids=["one-constraint", "two-constraints"])
def test_contradictions_are_seen_beside_rows_of_any_scale(solver, apart):
    """Ten rows, of which the first two contradict each other if ``tilt`` is zero."""

    def pair(p, batch):
        return jnp.stack([p[0] - 1, p[0] + batch["tilt"] * p[1] + 1])

    def others(p, batch):
        return batch["scale"] * (p[2:10] - 3)

    def together(p, batch):
        return jnp.concatenate([pair(p, batch), others(p, batch)])

    functions = (pair, others) if apart else (together,)

    @jax.jit
    def project(batch):
        constraints = cx.compose(*functions, gamma=0.5)
        found = cx.project(
            jnp.ones(12), constraints, jnp.zeros(12), batch=batch, solver=SOLVERS[solver]
        )
        asked = -0.5 * together(jnp.zeros(12), batch)
        moved = jax.jvp(lambda p: together(p, batch), (jnp.zeros(12),), (found.update,))[1]
        return moved - asked, {name: report.resolved for name, report in found.reports.items()}

    for scale in SCALES:
        left, resolved = project({"tilt": 1.0, "scale": scale})
        assert all(resolved.values())
        np.testing.assert_allclose(left[:2], 0, atol=0.05)
        np.testing.assert_allclose(left[2:] / scale, 0, atol=0.05)
        left, resolved = project({"tilt": 0.0, "scale": scale})
        np.testing.assert_allclose(np.abs(left[:2]), 0.5, atol=0.05)
        assert not resolved["pair" if apart else "together"]
        assert resolved["others"] if apart else True


@pytest.mark.parametrize("rows", [16, 64])
def test_each_row_is_done_in_a_constraint_whose_rows_differ_by_orders_of_magnitude(rows):
    """By the default step, to the two per cent of the longest step that are documented, or so."""
    rng = np.random.default_rng(rows)

    @jax.jit
    def step(p, matrix, right):
        optimizer = cx.constrain(optax.sgd(0.1), lambda p: matrix @ p - right, gamma=0.5)
        updates, state = optimizer.update(jnp.cos(p), optimizer.init(p), p)
        (report,) = cx.reports(state).values()
        return updates, matrix @ p - right, report

    for _ in range(8):
        scales = 10 ** rng.uniform(-3, 3, size=rows)
        matrix = scales[:, None] * rng.normal(size=(rows, 2000)) / np.sqrt(2000)
        matrix, right, p = (
            np.asarray(values, np.float32)
            for values in (matrix, scales * rng.normal(size=rows), rng.normal(size=2000))
        )
        updates, c, report = step(p, matrix, right)
        lengths = np.linalg.norm(matrix.astype(np.float64), axis=1)
        asked = -0.5 * np.asarray(c, np.float64) / lengths
        left = matrix.astype(np.float64) @ np.asarray(updates, np.float64) / lengths - asked
        assert report.resolved
        assert np.linalg.norm(left) <= 0.03 * np.linalg.norm(asked)
        # The lengths of rows are known to a third or so.
        assert np.max(np.abs(left)) <= 0.06 * np.max(np.abs(asked))
