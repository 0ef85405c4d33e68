"""The optima that `feasible-qp` compares with, against SciPy."""

import numpy as np
import pytest
import scipy.optimize

from constrainx.recipes.feasible_qp import draw_problem, find_optima

SIZES = (6, 2, 4, 40)
TESTS = 5


@pytest.mark.parametrize("objective", ["quadratic", "sine"])
def test_optima_are_those_of_a_general_solver(objective):
    problem = draw_problem(*SIZES)
    found = find_optima(*SIZES, TESTS, objective)

    def measure(y):
        linear = np.sin(y) if objective == "sine" else y
        return 0.5 * problem.q @ y**2 + problem.p @ linear

    for x, y in zip(problem.x[-TESTS:], found, strict=True):
        np.testing.assert_allclose(problem.A @ y, x, atol=1e-8)
        assert (problem.G @ y <= problem.h + 1e-8).all()
        reference = scipy.optimize.minimize(
            measure,
            y + 0.1,
            method="SLSQP",
            constraints=[
                {"type": "eq", "fun": lambda y, x=x: problem.A @ y - x},
                {"type": "ineq", "fun": lambda y: problem.h - problem.G @ y},
            ],
            options={"ftol": 1e-12, "maxiter": 500},
        )
        assert reference.success
        assert measure(y) <= reference.fun + 1e-6
