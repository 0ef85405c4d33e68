"""Whether a step did what was asked is judged row by row, whatever the units of the others."""

import jax
import jax.numpy as jnp
import numpy as np
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
