"""Solutions satisfy their equations and conditions, by differences and by another solver."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.integrate

from constrainx.trainers.equations import EQUATIONS, Burgers, as_field

SMOOTH = [equation for equation in EQUATIONS.values() if not isinstance(equation, Burgers)]


def exact_field(equation):
    """The solution, written in JAX."""
    k = getattr(equation, "wavenumber", 0.0)
    h = getattr(equation, "loss", 0.0)
    return {
        "poisson": lambda p: jnp.sin(jnp.pi * p[0]) * jnp.sin(2 * jnp.pi * p[1]),
        "heat-robin": lambda p: (
            jnp.exp(-(k**2) * p[0]) * (jnp.cos(k * p[1]) + h / k * jnp.sin(k * p[1]))
        ),
        "reaction-diffusion": lambda p: jnp.sin(2 * p[0] + 1) * jnp.cos(3 * p[1]),
    }[equation.name]


@pytest.mark.parametrize("equation", SMOOTH, ids=lambda equation: equation.name)
def test_solutions_satisfy_equation_and_conditions(x64, equation):
    u = exact_field(equation)
    inside, edge = equation.inside(50, seed=0), equation.edge(40)
    np.testing.assert_allclose(jax.vmap(u)(inside), equation.exact(inside), atol=1e-12)
    residual = jax.vmap(lambda p: equation.residual(u, p))(inside)
    condition = jax.vmap(lambda p: equation.condition(u, p))(edge)
    np.testing.assert_allclose(residual, 0, atol=1e-10)
    np.testing.assert_allclose(condition, 0, atol=1e-10)

    def wrong(p):
        return u(p) + 0.1 * p[0] * p[1] ** 2 + 0.1

    assert np.abs(jax.vmap(lambda p: equation.residual(wrong, p))(inside)).max() > 1e-3
    assert np.abs(jax.vmap(lambda p: equation.condition(wrong, p))(edge)).min() > 1e-3


def test_burgers_is_solved_as_by_a_spectral_method():
    """Fourier modes of an odd function, in time by a solver for stiff systems."""
    burgers = Burgers(viscosity=0.05)  # smooth enough for 128 modes
    count = 128
    x = -1 + 2 * np.arange(count) / count
    modes = np.fft.rfftfreq(count, 1 / count) * np.pi

    def move(_, u):
        hat = np.fft.rfft(u)
        slope, bend = np.fft.irfft(1j * modes * hat), np.fft.irfft(-(modes**2) * hat)
        return -u * slope + burgers.viscosity * bend

    solved = scipy.integrate.solve_ivp(
        move, (0, 0.7), -np.sin(np.pi * x), method="BDF", rtol=1e-8, atol=1e-10
    )
    points = np.stack([np.full(count, 0.7), x], axis=1)
    np.testing.assert_allclose(burgers.exact(points), solved.y[:, -1], atol=1e-5)
    # And the residual is that equation: by differences of the solution.
    p, h = np.array([0.4, 0.3]), 1e-3

    def u(t, x):
        return burgers.exact(np.array([[t, x]]))[0]

    time = (u(p[0] + h, p[1]) - u(p[0] - h, p[1])) / (2 * h)
    slope = (u(p[0], p[1] + h) - u(p[0], p[1] - h)) / (2 * h)
    bend = (u(p[0], p[1] + h) - 2 * u(*p) + u(p[0], p[1] - h)) / h**2
    assert abs(time + u(*p) * slope - burgers.viscosity * bend) < 1e-4


def test_the_sharp_shock_of_burgers_is_odd_and_bounded():
    points = Burgers().inside(500, seed=3)
    found = Burgers().exact(points)
    mirrored = Burgers().exact(points * [1, -1])
    np.testing.assert_allclose(found, -mirrored, atol=1e-10)
    assert np.abs(found).max() <= 1
    # Published by Basdevant et al. (1986): the steepest slope, at t = 1.6037 / π, is −152.00516.
    h = 1e-5
    left, right = Burgers().exact(np.array([[1.6037 / np.pi, -h], [1.6037 / np.pi, h]]))
    assert abs((right - left) / (2 * h) + 152.005) < 0.05


@pytest.mark.parametrize("equation", EQUATIONS.values(), ids=lambda equation: equation.name)
def test_points_lie_where_they_should(equation):
    low, high = np.transpose(equation.box)
    inside = equation.inside(300, seed=1)
    assert inside.shape == (300, 2)
    assert np.all((inside >= low) & (inside <= high))
    assert equation.contains(inside).all()
    edge = equation.edge(33)
    assert edge.shape == (33, 2)
    # A step outwards leaves the box or the domain; the last time of an equation is no edge.
    if equation.axes == ("t", "x"):
        side = np.sign(edge[:, 1] - np.mean(equation.box[1]))
        outward = np.where(edge[:, :1] == 0, [[-1.0, 0.0]], np.stack([0 * side, side], axis=1))
    else:
        outward = edge - np.mean(equation.box, axis=1)
    moved = edge + 1e-6 * outward
    outside = np.any((moved < low) | (moved > high), axis=1) | ~equation.contains(moved)
    assert outside.all()


@pytest.mark.parametrize("equation", EQUATIONS.values(), ids=lambda equation: equation.name)
def test_a_form_that_obeys_does_so_for_any_network(x64, equation):
    if not equation.can_enforce:
        with pytest.raises(NotImplementedError, match=equation.name):
            equation.enforce(jnp.zeros(2), jnp.zeros(()))
        return
    u = as_field(lambda x: jnp.cos(x[:, :1] + 3 * x[:, 1:]), equation, enforced=True)
    edge = equation.edge(40)
    np.testing.assert_allclose(jax.vmap(lambda p: equation.condition(u, p))(edge), 0, atol=1e-12)
