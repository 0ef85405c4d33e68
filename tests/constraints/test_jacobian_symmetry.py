"""Jacobian symmetry: exact values in low dimension, unbiased estimates in high."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from constrainx.constraints._attach import attach
from constrainx.constraints._compose import compose
from constrainx.constraints._jacobian_symmetry import JacobianSymmetry

KEY = jax.random.key(0)


def data(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def measure(constraint, model, batch):
    """The residual and the violation, compiled together."""

    @jax.jit
    def both(batch):
        residual = constraint.residual(model, batch, key=KEY)
        return residual, constraint.violation(model, batch, KEY)

    return map(np.asarray, both(batch))


class Network(nnx.Module):
    def __init__(self, inputs, outputs):
        self.first = nnx.Linear(inputs, 16, rngs=nnx.Rngs(0))
        self.second = nnx.Linear(16, outputs, rngs=nnx.Rngs(1))

    def __call__(self, x):
        return self.second(jnp.tanh(self.first(x)))


def asymmetries(field, x):
    """½‖J − Jᵀ‖²_F, an example at a time."""
    jacobian = jax.jit(jax.jacrev(lambda y: field(y[None])[0]))
    jacobians = np.stack([jacobian(y) for y in x])
    return 0.5 * np.sum((jacobians - jacobians.transpose(0, 2, 1)) ** 2, axis=(1, 2))


@pytest.mark.parametrize("probes", [None, 4])
def test_the_residual_of_a_gradient_field_is_zero(probes):
    model = Network(3, 1)

    def gradient(model, x):
        return jax.grad(lambda x: jnp.sum(model(x)))(x)

    constraint = JacobianSymmetry(gradient, probes=probes)
    residual, violation = measure(constraint, model, {"x": data(5, 3)})
    assert residual.shape == (5, 3 if probes is None else 4)
    np.testing.assert_allclose(residual, 0, atol=1e-5)
    assert violation < 1e-9


def test_the_residual_of_a_rotation_field_is_twice_its_speed():
    """J = [[0, −ω], [ω, 0]], so J₁₂ − J₂₁ = −2ω and ½‖J − Jᵀ‖² = 4ω²."""

    def rotation(omega, x):
        return omega * jnp.stack([-x[:, 1], x[:, 0]], axis=1)

    residual, violation = measure(JacobianSymmetry(rotation), 1.5, data(4, 2))
    np.testing.assert_allclose(residual, np.full((4, 1), -3.0))
    np.testing.assert_allclose(violation, 9.0)
    # In the plane wᵀ(J − Jᵀ)v is ±4ω or 0, and ‖(J − Jᵀ)v‖² = 8ω² for any signs v.
    residual, violation = measure(JacobianSymmetry(rotation, probes=50), 1.5, data(4, 2))
    assert set(np.abs(residual * 10).round(4).ravel().tolist()) == {0.0, 6.0}
    np.testing.assert_allclose(violation, 9.0, rtol=1e-6)


def test_the_residual_agrees_with_the_full_jacobian_of_a_network():
    model, x = Network(4, 4), data(6, 4)
    residual, violation = measure(JacobianSymmetry(), model, x)
    expected = asymmetries(model, x)
    np.testing.assert_allclose(np.sum(residual**2, axis=1), expected, rtol=1e-4)
    np.testing.assert_allclose(violation, expected.mean(), rtol=1e-4)


def test_fields_may_have_any_shape():
    mixing = data(12, 12)

    def field(model, x):
        return (jnp.tanh(x.reshape(-1, 12)) @ model).reshape(x.shape)

    x = data(3, 2, 2, 3)
    residual, violation = measure(JacobianSymmetry(field), mixing, x)
    assert residual.shape == (3, 66)
    expected = asymmetries(lambda x: jnp.tanh(x) @ mixing, x.reshape(3, 12))
    np.testing.assert_allclose(violation, expected.mean(), rtol=1e-4)


def test_a_field_may_depend_on_the_rest_of_the_batch():
    batch = {"x": data(4, 2), "sigma": jnp.array([1.0, 2.0, 3.0, 4.0])}

    def field(model, x, batch):
        return jnp.stack([-x[:, 1], x[:, 0]], axis=1) * batch["sigma"][:, None]

    residual, _ = measure(JacobianSymmetry(field), None, batch)
    np.testing.assert_allclose(residual[:, 0], -2 * batch["sigma"])
    model = Network(2, 2)
    rows = compose(JacobianSymmetry(field, reduce="norm"), model=model)
    norms = jax.jit(rows)(nnx.state(model, nnx.Param), batch, KEY)["jacobian-symmetry"]
    np.testing.assert_allclose(norms, 2 * batch["sigma"], rtol=1e-5)


class Large:
    """s(x) = M x in 1000 dimensions, M = U Vᵀ + diag(d) known but never formed by the field."""

    def __init__(self):
        self.U, self.V, self.d = data(1000, 2), data(1000, 2, seed=1), data(1000, seed=2)
        M = np.asarray(self.U, np.float64) @ np.asarray(self.V, np.float64).T
        self.exact = 0.5 * np.sum((M - M.T) ** 2)

    def __call__(self, x):
        return (x @ self.V) @ self.U.T + x * self.d


def test_probes_are_unbiased_in_a_thousand_dimensions():
    """Over many keys the mean is within four standard errors of the exact value."""
    model, x = Large(), data(2, 1000, seed=3)
    constraint = JacobianSymmetry(probes=3)

    def estimates(key):
        residual = constraint.residual(model, x, key=key)
        return jnp.mean(jnp.sum(residual**2, axis=1)), constraint.violation(model, x, key)

    keys = jax.random.split(KEY, 600)
    by_residual, by_violation = map(np.asarray, jax.jit(jax.vmap(estimates))(keys))
    for values in (by_residual, by_violation):
        error = values.std() / np.sqrt(len(values))
        assert error < 0.05 * model.exact
        assert abs(values.mean() - model.exact) < 4 * error
    assert by_violation.std() < 0.5 * by_residual.std()


def shapes(jaxpr):
    for equation in jaxpr.eqns:
        for variable in (*equation.invars, *equation.outvars):
            yield variable.aval.shape
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else [value]:
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from shapes(inner)


@pytest.mark.parametrize("method", ["residual", "violation"])
def test_probes_never_form_the_jacobian(method):
    model, constraint = Large(), JacobianSymmetry(probes=3)
    call = {
        "residual": lambda x: constraint.residual(model, x, key=KEY),
        "violation": lambda x: constraint.violation(model, x, KEY),
    }[method]
    largest = max(np.prod(shape) for shape in shapes(jax.make_jaxpr(call)(data(2, 1000)).jaxpr))
    # Two examples, three pairs of probes.
    assert largest <= 2 * 3 * 2 * 1000


def test_gradient_descent_finds_the_nearest_symmetric_matrix():
    """A linear field's nearest symmetric matrix is (M + Mᵀ)/2, and descent finds it."""
    M, x = data(3, 3), data(4, 3)
    constraint = JacobianSymmetry(lambda m, x: x @ m.T)
    slope = jax.jit(jax.grad(lambda m: constraint.violation(m, x, KEY)))
    moved = M
    for _ in range(20):
        moved = moved - 0.2 * slope(moved)
    np.testing.assert_allclose(moved, (M + M.T) / 2, atol=1e-5)


@pytest.mark.parametrize("probes", [None, 2])
def test_a_norm_makes_one_row_for_each_example(probes):
    model, x = Network(3, 3), data(4, 3)
    attach(model, JacobianSymmetry(probes=probes, reduce="norm", name="conservative"))
    composed = jax.jit(compose(model))
    rows = composed(nnx.state(model, nnx.Param), {"x": x}, KEY)["conservative"]
    assert rows.shape == (4,)
    if probes is None:
        np.testing.assert_allclose(rows, np.sqrt(asymmetries(model, x) / 3), rtol=1e-4)


def test_half_precision_fields_have_a_single_precision_violation():
    identity = jnp.eye(2, dtype=jnp.bfloat16)
    _, violation = measure(JacobianSymmetry(lambda m, x: x @ m), identity, identity)
    assert violation == 0
    assert violation.dtype == jnp.float32


@pytest.mark.parametrize("probes", [0, -1])
def test_fewer_than_one_probe_is_refused(probes):
    with pytest.raises(
        ValueError, match=rf"probes=...\)` must be an integer of at least 1, got {probes}.*None"
    ):
        JacobianSymmetry(probes=probes)


@pytest.mark.parametrize(
    ("of", "shape", "message"),
    [
        (lambda m, x: x[:, :2], (4, 3), r"in the shape of its inputs, \(4, 3\), got \(4, 2\)"),
        (lambda m, x: x, (4, 1), r"at least two coordinates, got shape \(4, 1\)"),
        (lambda m, x: x, (4,), r"at least two coordinates, got shape \(4,\)"),
    ],
)
def test_fields_of_the_wrong_shape_are_refused(of, shape, message):
    with pytest.raises(ValueError, match=message):
        JacobianSymmetry(of).residual(None, jnp.zeros(shape), key=KEY)
