"""Equivariant networks have a residual of zero, and others do not."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from constrainx.constraints._attach import attach
from constrainx.constraints._compose import compose
from constrainx.constraints._equivariance import Equivariance, Invariance
from constrainx.constraints.groups import (
    Cyclic,
    Dihedral,
    FiniteGroup,
    MatrixGroup,
    Orthogonal,
    Permutation,
    PixelGroup,
    SpecialOrthogonal,
    Translation,
)
from constrainx.constraints.reductions import Norm
from constrainx.constraints.representations import (
    Image,
    Permute,
    Regular,
    Sum,
    Tensor,
    Trivial,
    Vector,
)

KEY = jax.random.key(0)
PARTICLES = Sum((5, Trivial()), (15, Vector()))


def data(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def residuals(x, *pairs):
    """Returns the residuals of pairs of a constraint and a model, compiled together for speed."""

    @jax.jit
    def evaluate(x):
        return [constraint.residual(model, {"x": x}, key=KEY) for constraint, model in pairs]

    return [np.asarray(residual) for residual in evaluate(x)]


def sizes(x, *pairs):
    """The largest entry of each residual."""
    return [np.max(np.abs(residual)) for residual in residuals(x, *pairs)]


def convolve(x, kernels):
    dimensions = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x, kernels, (1, 1), "SAME", dimension_numbers=dimensions)


class Lifting(nnx.Module):
    """A group convolution: a filter moved by all elements of the group, stacked as channels."""

    def __init__(self, group, *, blocks):
        self.group = group
        self.filters = nnx.Param(data(3, 3, 2, blocks))
        self.head = nnx.Param(data(group.order * blocks, 3, seed=1))

    def features(self, x):
        moved = [Image()(self.group, g, self.filters[...]) for g in self.group.elements]
        kernels = jnp.stack(moved, axis=-1)
        return jax.nn.tanh(convolve(x, kernels.reshape(3, 3, 2, -1)))

    def pooled(self, x):
        blocks = self.features(x).sum(axis=(1, 2)).reshape(x.shape[0], -1, self.group.order)
        return blocks.sum(axis=-1)

    def __call__(self, x):
        return self.features(x).mean(axis=(1, 2)) @ self.head[...]


class Symmetric(nnx.Module):
    """A convolution with filters that are their own average over the group, plus an offset."""

    def __init__(self, group, *, offset):
        self.kernel = nnx.Param(
            sum(Image()(group, g, data(3, 3, 2, 4)) for g in group.elements) + offset
        )

    def __call__(self, x):
        return jax.nn.relu(convolve(x, self.kernel[...]))


@pytest.mark.parametrize("group", [Cyclic(2), Cyclic(4), Dihedral(1), Dihedral(4)], ids=str)
def test_symmetric_filters_commute_with_rotations_and_reflections(group):
    exact = Symmetric(group, offset=0.0)
    perturbed = Symmetric(group, offset=0.1 * data(3, 3, 2, 4, seed=3))
    constraint = Equivariance(group)
    zero, other = sizes(data(3, 6, 6, 2), (constraint, exact), (constraint, perturbed))
    assert zero < 1e-5
    assert other > 1e-2


@pytest.mark.parametrize("group", [Cyclic(4), Dihedral(4)], ids=str)
def test_a_lifting_convolution_has_the_regular_representation(group):
    model = Lifting(group, blocks=2)

    def features(model, x):
        return model.features(x)

    regular, trivial, invariant, variant = sizes(
        data(2, 6, 6, 2),
        (Equivariance(group, features, output=Regular()), model),
        (Equivariance(group, features, output=Image()), model),
        (Invariance(group, of=lambda m, x: m.pooled(x)), model),
        (Invariance(group), model),
    )
    assert regular < 1e-5
    assert trivial > 0.1
    assert invariant < 1e-4
    assert variant > 1e-2


def test_elements_chooses_how_many_elements_take_part():
    model = Lifting(Dihedral(4), blocks=1)

    def constraint(elements):
        return Equivariance(
            Dihedral(4), lambda m, x: m.features(x), output=Regular(), elements=elements
        )

    names = ("auto", "all", "generators", "sample")
    found = residuals(data(4, 6, 6, 2), *((constraint(name), model) for name in names))
    for residual, count in zip(found, (7, 7, 2, 1), strict=True):
        assert residual.shape == (4, count, 6, 6, 8)
        np.testing.assert_allclose(residual, 0, atol=1e-5)


def inertia(_, x):
    """Σ m (‖r‖² I − r rᵀ)."""
    masses, positions = x[:, :5], x[:, 5:].reshape(-1, 5, 3)
    squares = jnp.sum(positions**2, axis=-1)[..., None, None] * jnp.eye(3)
    outer = positions[..., :, None] * positions[..., None, :]
    return jnp.einsum("bk,bkij->bij", masses, squares - outer, precision="highest")


@pytest.mark.parametrize("group", [Orthogonal(3), SpecialOrthogonal(3)], ids=str)
def test_the_moment_of_inertia_is_a_tensor(group):
    def flat(model, x):
        return inertia(model, x).reshape(-1, 9)

    def off(model, x):
        return inertia(model, x) + x[:, 5, None, None]

    def trace(model, x):
        return jnp.trace(inertia(model, x), axis1=1, axis2=2)

    tensors = {"input": PARTICLES, "output": Tensor(2)}
    shaped, flattened, invariant, wrong = residuals(
        data(8, 20),
        (Equivariance(group, inertia, **tensors), None),
        (Equivariance(group, flat, **tensors), None),
        (Invariance(group, trace, input=PARTICLES), None),
        (Equivariance(group, off, **tensors), None),
    )
    assert shaped.shape == (8, 1, 3, 3)
    assert flattened.shape == (8, 1, 9)
    assert invariant.shape == (8, 1)
    for residual in (shaped, flattened, invariant):
        np.testing.assert_allclose(residual, 0, atol=1e-4)
    assert np.max(np.abs(wrong)) > 0.1


def test_a_cross_product_follows_rotations_but_not_reflections():

    def cross(_, x):
        return jnp.cross(x[:, :3], x[:, 3:])

    proper, improper = sizes(
        data(16, 6),
        (Equivariance(SpecialOrthogonal(3), cross), None),
        (Equivariance(Orthogonal(3), cross), None),
    )
    assert proper < 1e-5
    assert improper > 0.1


def test_a_deep_set_is_equivariant_under_permutations():
    mixing = nnx.Linear(2, 3, rngs=nnx.Rngs(0))

    def deep_set(model, x):
        return jnp.tanh(model(x)) + jnp.mean(model(x), axis=1, keepdims=True)

    def first_is_special(model, x):
        return deep_set(model, x).at[:, 0].multiply(2)

    for count in (3, 20):
        group = Permutation(count)
        equivariant, special, invariant, variant = residuals(
            data(3, count, 2),
            (Equivariance(group, deep_set), mixing),
            (Equivariance(group, first_is_special), mixing),
            (Invariance(group, lambda m, x: deep_set(m, x).sum(axis=1)), mixing),
            (Invariance(group, lambda m, x: m(x)[:, 0]), mixing),
        )
        assert equivariant.shape == (3, 5 if count == 3 else 1, count, 3)
        np.testing.assert_allclose(equivariant, 0, atol=1e-5)
        np.testing.assert_allclose(invariant, 0, atol=1e-4)
        assert np.max(np.abs(special)) > 1e-2
        assert np.max(np.abs(variant)) > 1e-2


def test_generators_work_for_a_group_too_large_to_list():
    constraint = Equivariance(
        Permutation(20), lambda m, x: jnp.cumsum(x, axis=1), elements="generators"
    )
    (residual,) = residuals(data(3, 20, 2), (constraint, None))
    assert residual.shape == (3, 2, 20, 2)
    assert np.max(np.abs(residual)) > 0.1


def test_circular_convolutions_commute_with_shifts():
    def convolution(padding):
        return nnx.Conv(2, 3, (3, 3), padding=padding, rngs=nnx.Rngs(0))

    constraint = Equivariance(Translation((6, 5)))
    assert constraint.elements == "sample"
    circular, padded = sizes(
        data(4, 6, 5, 2),
        (constraint, convolution("CIRCULAR")),
        (constraint, convolution("SAME")),
    )
    assert circular < 1e-5
    assert padded > 1e-2


def test_cubing_coordinates_commutes_with_the_rotations_of_a_cube():
    cube = MatrixGroup.generated_by(
        [[[1, 0, 0], [0, 0, -1], [0, 1, 0]], [[0, -1, 0], [1, 0, 0], [0, 0, 1]]]
    )

    def cubes(_, x):
        return x**3  # knows the axes, but not which is which

    some, others = residuals(
        data(3, 3),
        (Equivariance(cube, cubes, elements="all"), None),
        (Equivariance(Orthogonal(3), cubes), None),
    )
    assert some.shape == (3, 23, 3)
    np.testing.assert_allclose(some, 0, atol=1e-5)
    assert np.max(np.abs(others)) > 0.1


def test_the_violation_is_the_mean_square_norm_over_the_group():
    """Against a loop over all four rotations, the identity included, as in the paper."""
    W, x = data(2, 2), data(5, 2, seed=1)
    constraint = Equivariance(Cyclic(4), lambda m, x: x @ m.T, input=Vector(), output=Vector())
    expected = []
    for k in range(4):
        R = np.linalg.matrix_power(np.array([[0, -1], [1, 0]]), k)
        expected += [np.sum((W @ R @ v - R @ W @ v) ** 2) for v in np.asarray(x)]
    violation = jax.jit(lambda W: constraint.violation(W, x, KEY))(W)
    np.testing.assert_allclose(violation, np.mean(expected), rtol=1e-5)


def test_samples_have_the_same_violation_in_expectation():
    W, x = data(2, 2), data(4000, 2, seed=1)

    def constraint(elements):
        def of(model, x):
            return x @ model.T

        return Equivariance(Dihedral(3), of, input=Vector(), output=Vector(), elements=elements)

    every, sampled = jax.jit(
        lambda W: [constraint(elements).violation(W, x, KEY) for elements in ("all", "sample")]
    )(W)
    # The squares vary about as much as their mean, so 4000 of them are known to a few per cent.
    np.testing.assert_allclose(sampled, every, rtol=0.1)


def test_each_example_and_each_step_draws_its_own_element():
    x = jnp.ones((6, 3))
    constraint = Equivariance(Orthogonal(3), lambda m, x: x * jnp.arange(3.0))
    residual = jax.jit(lambda key: constraint.residual(None, x, key=key))
    first, second = residual(KEY), residual(jax.random.key(1))
    assert len(np.unique(np.asarray(first).round(4), axis=0)) == 6
    assert not np.allclose(first, second)


def test_the_network_is_called_once():
    calls = []

    def network(_, x):
        calls.append(x.shape)
        return x

    constraint = Equivariance(Dihedral(4), network)
    residuals(data(5, 4, 4, 1), (constraint, None))
    assert calls == [(40, 4, 4, 1)]


@pytest.mark.parametrize(
    ("batch", "inputs"),
    [
        (lambda x: x, "x"),
        (lambda x: np.asarray(x), "x"),
        (lambda x: {"x": x, "y": 0}, "x"),
        (lambda x: {"image": x}, "image"),
        (lambda x: (0, x), 1),
        (lambda x: type("Batch", (), {"points": x})(), "points"),
    ],
)
def test_examples_are_found_in_batches_of_any_form(batch, inputs):
    x = data(3, 2)
    plane = {"input": Vector(), "output": Vector()}
    constraint = Equivariance(Cyclic(2), lambda m, x: x**2, inputs=inputs, **plane)
    found = constraint.residual(None, batch(x), key=KEY)
    np.testing.assert_allclose(found[:, 0], 2 * x**2, rtol=1e-6)


def test_rows_of_a_norm_are_those_of_its_slices():
    """``reduce="norm"`` evaluates the residual on slices of the batch, each with its own key."""
    x = data(6, 4, 4, 1)
    model = nnx.Conv(1, 4, (3, 3), rngs=nnx.Rngs(0))
    parameters = nnx.state(model, nnx.Param)
    constraint = Equivariance(Cyclic(4), output=Regular(), reduce=Norm(groups=3))
    composed = compose(attach(nnx.clone(model), constraint))
    rows = jax.jit(lambda p: composed(p, {"x": x}, KEY)["equivariance"])(parameters)
    (residual,) = residuals(x, (constraint, model))
    expected = np.sqrt(np.mean(residual.reshape(3, -1) ** 2, axis=1))
    np.testing.assert_allclose(rows, expected, rtol=1e-5)


def test_the_mean_over_a_batch_has_a_row_for_each_entry_of_the_output():
    model = nnx.Linear(20, 9, rngs=nnx.Rngs(0))
    constraint = Equivariance(Orthogonal(3), input=PARTICLES, output=Tensor(2), reduce="mean")
    composed = compose(attach(model, constraint))
    parameters = nnx.state(model, nnx.Param)
    rows = jax.eval_shape(lambda p: composed(p, {"x": data(6, 20)}, KEY), parameters)
    assert rows["equivariance"].shape == (9,)


def test_gradient_descent_finds_the_nearest_equivariant_matrix():
    """The nearest equivariant matrix of C4 on the plane has the form [[a, −b], [b, a]]."""
    x = data(32, 2)
    constraint = Equivariance(Cyclic(4), lambda m, x: x @ m, input=Vector(), output=Vector())
    slope = jax.jit(jax.grad(lambda W: constraint.violation(W, x, KEY)))
    W = data(2, 2, seed=1)
    a, b = (W[0, 0] + W[1, 1]) / 2, (W[0, 1] - W[1, 0]) / 2
    for _ in range(60):
        W = W - 0.1 * slope(W)
    np.testing.assert_allclose(W, [[a, b], [-b, a]], atol=2e-2)
    assert jax.jit(lambda W: constraint.violation(W, x, KEY))(W) < 1e-6


def test_half_precision_residuals_have_a_single_precision_violation():
    x = data(3, 4, 4, 2).astype(jnp.bfloat16)
    constraint = Equivariance(Dihedral(4), lambda m, x: x**2)
    (residual,) = residuals(x, (constraint, None))
    assert residual.dtype == jnp.bfloat16
    violation = jax.jit(lambda x: constraint.violation(None, x, KEY))(x)
    assert violation == 0
    assert violation.dtype == jnp.float32


@pytest.mark.parametrize(
    ("group", "expected"),
    [
        (Cyclic(4), Image()),
        (Dihedral(2), Image()),
        (Translation((3,)), Image()),
        (Orthogonal(3), Vector()),
        (SpecialOrthogonal(2), Vector()),
        (MatrixGroup([[[1]], [[-1]]]), Vector()),
        (Permutation(3), Permute(axis=0)),
    ],
)
def test_each_group_has_its_usual_representation(group, expected):
    assert Equivariance(group).input == Equivariance(group).output == expected
    assert Invariance(group).input == expected
    assert Invariance(group).output == Trivial()


@dataclasses.dataclass(frozen=True)
class Mirror(FiniteGroup, PixelGroup):
    """Left and right exchanged or not, as a user would write it: elements 1 and −1."""

    dimension, identity, order = None, 1, 2
    elements, generators = np.array([1, -1]), np.array([-1])
    usual_representation = Image()

    def compose(self, g, h):
        return g * h

    def inverse(self, g):
        return g

    def matrix(self, g):
        raise NotImplementedError

    def sample(self, key, count):
        return jax.random.rademacher(key, (count,))

    def move_pixels(self, g, array):
        return jnp.where(g < 0, jnp.flip(array, 1), array)


@pytest.mark.parametrize("elements", ["all", "sample"])
def test_a_group_written_by_a_user_acts_in_its_usual_way(elements):
    constraint = Equivariance(Mirror(), lambda m, x: m * x, elements=elements)
    assert constraint.input == constraint.output == Image()
    symmetric, skew = jnp.array([1.0, 2.0, 1.0]), jnp.array([1.0, 2.0, 3.0])
    zero, other = sizes(data(8, 2, 3), (constraint, symmetric), (constraint, skew))
    assert zero == 0
    assert other > 1e-2


def test_a_group_that_does_not_say_how_it_acts_acts_on_vectors():
    @dataclasses.dataclass(frozen=True)
    class Signs(Mirror):
        dimension, usual_representation = 1, None

        def matrix(self, g):
            return jnp.full((1, 1), g, float)

    assert Equivariance(Signs()).input == Vector()
    (residual,) = residuals(data(4, 1), (Equivariance(Signs(), lambda m, x: x**2), None))
    np.testing.assert_allclose(residual[:, 0], 2 * data(4, 1) ** 2, rtol=1e-6)


def test_equal_constraints_compare_equal_and_have_names():
    def features(model, x):
        return model(x)

    assert Equivariance(Cyclic(4), features) == Equivariance(Cyclic(4), of=features)
    assert hash(Invariance(Orthogonal(3))) == hash(Invariance(Orthogonal(3)))
    assert Equivariance(Cyclic(4)).label == "equivariance"
    assert Invariance(Cyclic(4), name="turns", gamma=1.0, reduce="norm").label == "turns"


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Equivariance("C4"), r"`Equivariance\(group=...\)` must be a group.*'C4'"),
        (lambda: Equivariance(Cyclic), "must be a group"),
        (lambda: Equivariance(Cyclic(3)), "interpolate"),
        (lambda: Equivariance(Cyclic(4), input="image"), r"input=...\)` must be a representation"),
        (lambda: Equivariance(Cyclic(4), output=Image), r"output=...\)` must be a representation"),
        (lambda: Equivariance(Cyclic(4), output=Permute()), "groups that permute things"),
        (lambda: Equivariance(Cyclic(4), elements="al"), "Did you mean 'all'"),
        (
            lambda: Invariance(Orthogonal(3), elements="all"),
            r"`Invariance\(elements='all'\)`.*finite",
        ),
        (lambda: Equivariance(Permutation(12), elements="all"), "too many to list"),
        (lambda: Equivariance(Cyclic(1)), "only the identity"),
        (lambda: Equivariance(Cyclic(4), reduce="nrom"), "Did you mean 'norm'"),
    ],
)
def test_wrong_arguments_are_refused_when_the_constraint_is_built(build, message):
    with pytest.raises((TypeError, ValueError), match=message):
        build()


@pytest.mark.parametrize(
    ("constraint", "batch", "message"),
    [
        (Equivariance(Cyclic(4), lambda m, x: x[:, 0, 0]), np.zeros((2, 4, 4, 1)), r"Trivial\(\)"),
        (Equivariance(Cyclic(4)), np.zeros((2, 4, 5, 1)), "square maps"),
        (
            Equivariance(Cyclic(4), lambda m, x: x.sum()),
            np.zeros((2, 4, 4, 1)),
            "each of the 8 inputs",
        ),
        (
            Equivariance(Cyclic(4), lambda m, x: {"a": x}),
            np.zeros((1, 4, 4)),
            "must return an array",
        ),
        (
            Equivariance(Cyclic(4), lambda m, x: x > 0, name="turns"),
            np.zeros((1, 4, 4)),
            "'turns' is bool",
        ),
        (Equivariance(Cyclic(4), inputs="imag"), {"image": 0, "label": 1}, "Did you mean 'image'"),
        (Equivariance(Cyclic(4)), (0, 1), "tuple with `inputs` a position"),
        (Equivariance(Cyclic(4), inputs=2), (0, 1), "tuple with `inputs` a position"),
        (Equivariance(Cyclic(4)), None, "got NoneType"),
    ],
)
def test_wrong_shapes_and_batches_are_refused_when_traced(constraint, batch, message):
    with pytest.raises((TypeError, ValueError), match=message):
        constraint.residual(lambda x: x, batch, key=KEY)
