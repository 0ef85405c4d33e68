"""Steps that constraints know, against the rows solved by the Gram matrix."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import constrainx as cx
from constrainx.step._closed_form import split_closed_forms
from constrainx.step._method import Point


class Stack(nnx.Module):
    """Layers of every kind that a constraint may select from."""

    def __init__(self, rngs):
        self.first = nnx.Linear(5, 3, rngs=rngs)
        self.wide = nnx.Linear(3, 4, use_bias=False, rngs=rngs)
        self.conv = nnx.Conv(2, 4, (2, 2), rngs=rngs)
        self.stacked = nnx.vmap(lambda r: nnx.Linear(3, 3, rngs=r))(rngs.split(2))


SUMS = np.random.default_rng(0).normal(size=(2, 5))
CONSTRAINTS = {
    "unit": cx.UnitNorm(lambda m: m.first.kernel[...]),
    "unit by column": cx.UnitNorm(lambda m: m.first.kernel[...], axis=0),
    "unit in a stack": cx.UnitNorm(lambda m: m.stacked.kernel[...], axis=(1, 2)),
    "unit in two layers": cx.UnitNorm(
        lambda m: jnp.concatenate([m.first.kernel[...].T.reshape(-1), m.wide.kernel[1:].ravel()])
    ),
    "tall": cx.Orthogonality(lambda m: m.first.kernel[...]),
    "wide": cx.Orthogonality(lambda m: m.wide.kernel[...]),
    "convolution": cx.Orthogonality(lambda m: m.conv.kernel[...].reshape(-1, 4)),
    "affine": cx.Affine(lambda m: m.first.kernel[:, 1], SUMS, [0.3, -1.0]),
    "affine by axis": cx.Affine(lambda m: m.first.kernel[...], SUMS, 0.5, axis=0),
    "affine of rank one": cx.Affine(
        lambda m: m.first.bias[...], [[1.0, 2.0, -1.0], [-2.0, -4.0, 2.0]], [1.0, -2.0]
    ),
}


def make(dtype=jnp.float64, seed=0):
    """A model, its parameters and a vector like them."""
    model = Stack(nnx.Rngs(seed))
    parameters = nnx.state(model, nnx.Param)
    keys = jax.random.key(seed + 1)
    parameters = jax.tree.map(
        lambda p: jax.random.normal(jax.random.fold_in(keys, p.size), p.shape, dtype), parameters
    )
    vector = jax.tree.map(lambda p: jnp.cos(3 * p) - 0.2, parameters)
    nnx.update(model, parameters)
    return model, nnx.as_pure(parameters), nnx.as_pure(vector)


def take(constraint, model, parameters, vector, *, solver, placement="update", gamma=None):
    """What comes out of an optimizer that hands its gradients on."""
    method = cx.NullSpace(placement=placement, solver=solver)
    optimizer = cx.constrain(optax.sgd(0.5), constraint, model=model, method=method, gamma=gamma)
    state = optimizer.init(parameters)
    return jax.jit(lambda v, p: optimizer.update(v, state, p, module=model))(vector, parameters)


def is_known(model, parameters, *constraints):
    """Which constraints are corrected in closed form."""
    composed = cx.compose(*constraints, model=model)
    point = Point(composed, parameters, jnp.zeros((), jnp.int32), None, jax.random.key(0), model)
    return [form.member.name for form in split_closed_forms(point)[0]]


def assert_close(a, b, *, atol):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=atol)


@pytest.mark.parametrize("name", CONSTRAINTS)
def test_the_known_step_is_that_of_the_gram_matrix(name, x64):
    model, parameters, vector = make()
    constraint = CONSTRAINTS[name]
    assert is_known(model, parameters, constraint) == [constraint.label]
    composed = cx.compose(constraint, model=model, gamma=0.7)
    dense = cx.project(vector, composed, parameters, model=model, solver="gram")
    negative = jax.tree.map(lambda v: -2 * v, vector)  # sgd(0.5) turns it around
    found, state = take(constraint, model, parameters, negative, solver="auto", gamma=0.7)
    assert_close(found, dense.update, atol=1e-12)
    report = cx.reports(state)[constraint.label]
    assert report.resolved
    assert report.iterations == 0
    rows = dense.rows[constraint.label]
    np.testing.assert_allclose(report.violation, jnp.sqrt(jnp.mean(rows**2)), rtol=1e-6)


@pytest.mark.parametrize("name", ["unit by column", "tall", "affine by axis"])
@pytest.mark.parametrize("placement", ["gradient", "twice"])
def test_both_stages_are_those_of_the_gram_matrix(name, placement, x64):
    model, parameters, vector = make(seed=1)
    constraint = dataclasses.replace(CONSTRAINTS[name], gamma=optax.linear_schedule(0.9, 0.1, 9))
    arguments = (constraint, model, parameters, vector)
    known, state = take(*arguments, solver="auto", placement=placement)
    dense, other = take(*arguments, solver="gram", placement=placement)
    assert_close(known, dense, atol=1e-12)
    np.testing.assert_allclose(state.constraints.removed, other.constraints.removed, atol=1e-6)


@pytest.mark.parametrize("name", ["unit", "wide"])
def test_single_precision_is_as_exact_as_it_can_be(name):
    model, parameters, vector = make(jnp.float32)
    # Near the constraints: the error of either route grows with the condition of the rows.
    parameters = jax.tree.map(lambda p: jnp.eye(*p.shape[-2:]) + 0.1 * p, parameters)
    arguments = (CONSTRAINTS[name], model, parameters, vector)
    known, _ = take(*arguments, solver="auto", gamma=1.0)
    dense, _ = take(*arguments, solver="gram", gamma=1.0)
    assert_close(known, dense, atol=5e-6)


def test_constraints_of_different_weights_are_known_and_those_that_share_are_not(x64):
    model, parameters, vector = make()
    unit = cx.UnitNorm(lambda m: m.first.kernel[...], axis=0, gamma=0.4)
    tall, wide = CONSTRAINTS["tall"], CONSTRAINTS["wide"]
    assert is_known(model, parameters, unit, wide) == ["unit-norm", "orthogonality"]
    assert is_known(model, parameters, unit, CONSTRAINTS["affine"], wide) == ["orthogonality"]
    # Columns of length one, twice over: dependent rows, which the Gram matrix can solve.
    assert is_known(model, parameters, unit, tall) == []
    every = (CONSTRAINTS["affine by axis"], dataclasses.replace(unit, axis=None), wide)
    known, _ = take(every, model, parameters, vector, solver="auto")
    dense, _ = take(every, model, parameters, vector, solver="gram")
    assert_close(known, dense, atol=1e-10)


@pytest.mark.parametrize(
    "of",
    [
        lambda m: 2 * m.first.kernel[...],
        lambda m: m.first.kernel[...] @ m.wide.kernel[...],
        lambda m: jnp.stack([m.first.bias[...], m.first.bias[...]]),
        lambda m: jnp.concatenate([m.first.kernel[...], jnp.ones((1, 3))]),
    ],
    ids=["scaled", "a product", "twice the same", "with a constant"],
)
def test_what_is_not_merely_selected_is_linearised(of, x64):
    model, parameters, vector = make()
    constraint = cx.UnitNorm(of, gamma=0.5)
    assert is_known(model, parameters, constraint) == []
    known, _ = take(constraint, model, parameters, vector, solver="auto")
    dense, _ = take(constraint, model, parameters, vector, solver="gram")
    assert_close(known, dense, atol=1e-12)


def test_weights_that_must_stay_are_linearised_around(x64):
    model, parameters, _vector = make()
    constraint = cx.UnitNorm(
        CONSTRAINTS["unit in two layers"].of, wrt=nnx.All(nnx.Param, nnx.PathContains("first"))
    )
    assert is_known(model, parameters, constraint) == []
    inside = dataclasses.replace(constraint, of=lambda m: m.first.kernel[...])
    assert is_known(model, parameters, inside) == ["unit-norm"]
    reduced = cx.UnitNorm(lambda m: m.first.kernel[...], axis=0, reduce="rms")
    assert is_known(model, parameters, reduced) == []


def test_a_known_step_can_be_differentiated_at_orthonormal_columns(x64):
    """Where all eigenvalues meet and those of single vectors have no derivative."""
    model, parameters, vector = make()
    parameters["first"]["kernel"] = jnp.eye(5, 3)

    def after(scale, solver):
        method = cx.NullSpace(placement="update", solver=solver)
        optimizer = cx.constrain(
            optax.sgd(0.5), CONSTRAINTS["tall"], model=model, method=method, gamma=0.5
        )
        moved = dict(parameters, first=jax.tree.map(lambda p: scale * p, parameters["first"]))
        update, _ = optimizer.update(vector, optimizer.init(moved), moved, module=model)
        return jnp.sum(jnp.sin(update["first"]["kernel"]))

    known = jax.grad(after)(1.0, "auto")
    finite = (after(1 + 1e-6, "auto") - after(1 - 1e-6, "auto")) / 2e-6
    np.testing.assert_allclose(known, finite, rtol=1e-7)


def test_what_has_no_step_is_left_and_said():
    model, parameters, vector = make(jnp.float32)
    parameters["first"]["kernel"] = parameters["first"]["kernel"].at[:, 1].set(0.0)
    for name in ("unit by column", "tall"):
        found, state = take(CONSTRAINTS[name], model, parameters, vector, solver="auto")
        assert all(jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(found))
        assert not cx.reports(state)[CONSTRAINTS[name].label].resolved


def test_a_constraint_that_pauses_leaves_the_update_alone(x64):
    model, parameters, vector = make()
    later = dataclasses.replace(CONSTRAINTS["tall"], start=3)
    found, state = take(later, model, parameters, vector, solver="auto")
    assert_close(found, jax.tree.map(lambda v: -0.5 * v, vector), atol=0)
    assert not cx.reports(state)["orthogonality"].active


def test_a_gamma_that_is_not_allowed_is_not_silent(x64):
    model, parameters, vector = make()
    for constraint in (CONSTRAINTS["tall"], cx.SpectralNorm(1.0)):
        wrong = dataclasses.replace(constraint, gamma=lambda step: -1.0 + 0 * step)
        found, _ = take(wrong, model, parameters, vector, solver="auto", placement="twice")
        assert jnp.isnan(found["first"]["kernel"]).all()


@pytest.mark.parametrize(
    ("matrix", "offset", "axis", "message"),
    [
        ([1.0, 2.0], 0.0, None, r"Write a single equation as `matrix\[None\]`"),
        ([[1.0, 2.0], [2.0, 4.0]], [1.0, 1.0], None, "has no solution"),
        ([[0.0, 0.0]], 0.0, None, "must not be zero"),
        ([[1.0, 2.0]], [1.0, 1.0], None, "one for each of the 1 rows"),
    ],
)
def test_affine_equations_without_sense_are_refused(matrix, offset, axis, message):
    with pytest.raises(ValueError, match=message):
        cx.Affine(lambda m: m.kernel[...], matrix, offset, axis=axis)


def test_affine_equations_compare_by_value_and_name_a_wrong_shape():
    first, second = (cx.Affine(jnp.ravel, [[1.0, 2.0]], offset) for offset in (0.0, 1.0))
    assert first == cx.Affine(jnp.ravel, np.array([[1.0, 2.0]]))
    assert first != second
    assert hash(first) == hash(dataclasses.replace(first))
    with pytest.raises(ValueError, match="has 2 columns, but `of` selects an array of shape"):
        first.residual(jnp.ones(3), None, key=None)
