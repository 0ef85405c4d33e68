"""Representations are homomorphisms, act as their formulas say, and refuse what they cannot do."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from constrainx.constraints.groups import (
    Cyclic,
    Dihedral,
    FiniteGroup,
    MatrixGroup,
    Orthogonal,
    Permutation,
    SpecialOrthogonal,
    Translation,
)
from constrainx.constraints.representations import (
    Image,
    Permute,
    Regular,
    Representation,
    Sum,
    Tensor,
    Trivial,
    Vector,
)

CUBE = MatrixGroup.generated_by(
    [[[1, 0, 0], [0, 0, -1], [0, 1, 0]], [[0, -1, 0], [1, 0, 0], [0, 0, 1]]]
)

CASES = {
    "trivial": (Cyclic(5), Trivial(), (3,)),
    "vector": (Orthogonal(3), Vector(), (3,)),
    "vectors in rows": (SpecialOrthogonal(3), Vector(), (5, 3)),
    "vectors in a row": (Orthogonal(3), Vector(copies=5), (15,)),
    "vector in the plane": (Dihedral(5), Vector(), (2,)),
    "vector of a cube": (CUBE, Vector(), (3,)),
    "matrix": (Orthogonal(3), Tensor(2), (3, 3)),
    "flat matrix": (Orthogonal(3), Tensor(2), (9,)),
    "flat matrices": (SpecialOrthogonal(2), Tensor(2), (5, 12)),
    "third rank": (SpecialOrthogonal(2), Tensor(3), (2, 2, 2)),
    "image, C2": (Cyclic(2), Image(), (3, 5, 2)),
    "image, C4": (Cyclic(4), Image(), (4, 4, 2)),
    "image, D2": (Dihedral(2), Image(), (3, 5, 2)),
    "image, D4": (Dihedral(4), Image(), (5, 5, 2)),
    "image, shifts": (Translation((3, 4)), Image(), (3, 4, 2)),
    "signal, shifts": (Translation((6,)), Image(), (6, 2)),
    "regular, C4": (Cyclic(4), Regular(), (4, 4, 8)),
    "regular, D4": (Dihedral(4), Regular(), (3, 3, 16)),
    "regular, no pixels": (Dihedral(3), Regular(base=Trivial()), (12,)),
    "regular, cube": (CUBE, Regular(base=Trivial()), (48,)),
    "set": (Permutation(5), Permute(), (5, 2)),
    "masses and positions": (Orthogonal(3), Sum((5, Trivial()), (15, Vector())), (20,)),
    "sum of tensors": (Orthogonal(3), Sum([(3, Vector()), (9, Tensor(2)), (1, Trivial())]), (13,)),
    "sum of channels": (Dihedral(4), Sum((3, Image()), (8, Regular())), (3, 3, 11)),
}


@functools.cache
def measure_laws(case):
    """Compiles a function that returns the largest error in each law, over a few elements."""
    group, representation, _ = CASES[case]

    def act(element, array):
        return representation(group, element, array)

    def laws(g, h, x, y):
        moved = act(g, x)
        pairs = {
            "homomorphism": (act(g, act(h, x)), act(group.compose(g, h), x)),
            "identity": (act(jnp.asarray(group.identity), x), x),
            "inverse": (act(group.inverse(g), moved), x),
            "linear": (act(g, 2 * x - y), 2 * moved - act(g, y)),
            "norm": (jnp.mean(jnp.square(moved)), jnp.mean(jnp.square(x))),
        }
        return {law: jnp.max(jnp.abs(left - right)) for law, (left, right) in pairs.items()}

    return jax.jit(jax.vmap(laws))


def elements_of(group, count, seed):
    # NumPy where possible, since compiling a random generator for each group takes seconds.
    if isinstance(group, FiniteGroup):
        return group.elements[np.random.default_rng(seed).integers(group.order, size=count)]
    return np.asarray(group.sample(jax.random.key(seed), count))


@pytest.mark.parametrize("case", CASES)
@given(seed=st.integers(0, 2**31 - 1))
@settings(max_examples=10, deadline=None)
def test_representations_are_orthogonal_homomorphisms(case, seed):
    group, _, shape = CASES[case]
    rng = np.random.default_rng(seed)
    g, h = elements_of(group, 24, seed).reshape(2, 12, *np.shape(group.identity))
    x, y = rng.uniform(-1, 1, size=(2, 12, *shape)).astype(np.float32)
    for law, errors in measure_laws(case)(g, h, x, y).items():
        np.testing.assert_array_less(errors, 2e-5, err_msg=law)


@pytest.mark.parametrize(
    "case", ["image, C2", "image, C4", "image, D2", "image, D4", "regular, C4"]
)
def test_constant_and_traced_elements_act_alike(case):
    group, representation, shape = CASES[case]

    @jax.jit
    def both(x):
        known = jnp.stack([representation(group, element, x) for element in group.elements])
        return known, jax.vmap(lambda g: representation(group, g, x))(jnp.asarray(group.elements))

    known, traced = both(np.random.default_rng(0).normal(size=shape))
    np.testing.assert_allclose(known, traced, atol=1e-6)


def same(left, right):
    np.testing.assert_allclose(left, right, atol=2e-5)


def test_a_vector_is_multiplied_from_the_left():
    rotation = elements_of(SpecialOrthogonal(3), 24, 0)[0]
    vectors = np.random.default_rng(0).normal(size=(5, 3))
    expected = np.stack([rotation @ v for v in vectors])
    vectors = jnp.asarray(vectors)
    same(Vector()(SpecialOrthogonal(3), rotation, vectors), expected)
    same(Vector()(SpecialOrthogonal(3), rotation, vectors.ravel()), expected.ravel())


def test_a_tensor_is_multiplied_from_both_sides():
    R = elements_of(Orthogonal(3), 24, 0)[0]
    T = np.arange(9.0).reshape(3, 3)
    same(Tensor(2)(Orthogonal(3), R, jnp.asarray(T)), R @ T @ R.T)
    same(Tensor(2)(Orthogonal(3), R, jnp.asarray(T.ravel())), (R @ T @ R.T).ravel())


@pytest.mark.parametrize("group", [Cyclic(4), Dihedral(4), Dihedral(2), Dihedral(1)], ids=str)
def test_pixels_move_as_the_matrices_say(group):
    """A pixel at (x, y) from the centre, y upwards, is at M(g)(x, y) afterwards."""
    pixels = np.arange(25).reshape(5, 5)
    for element in group.elements:
        moved = np.asarray(Image()(group, element, jnp.asarray(pixels)))
        for row, column in np.ndindex(5, 5):
            x, y = np.asarray(group.matrix(element)) @ [column - 2, 2 - row]
            assert moved[round(2 - y), round(2 + x)] == pixels[row, column]


def test_the_regular_representation_is_the_group_acting_on_itself():
    group = Dihedral(4)
    x = jnp.arange(144).reshape(3, 3, 16)
    for g in group.elements:
        moved = np.asarray(Regular()(group, g, x))
        pixels = np.asarray(Image()(group, g, x))
        for h in group.elements:
            source = group.compose(group.inverse(g), h)
            np.testing.assert_array_equal(moved[..., [h, 8 + h]], pixels[..., [source, 8 + source]])


def test_shifted_pixels_wrap_around():
    moved = Image()(Translation((4,)), np.array([1]), jnp.arange(4))
    np.testing.assert_array_equal(moved, [3, 0, 1, 2])


def test_a_permutation_moves_each_entry_to_its_image():
    moved = Permute()(Permutation(3), np.array([1, 2, 0]), jnp.arange(3))
    np.testing.assert_array_equal(moved, [2, 0, 1])


def test_half_precision_loses_one_rounding_only():
    R = elements_of(Orthogonal(3), 24, 0)[0]
    T = jnp.asarray(np.random.default_rng(0).normal(size=(3, 3)), jnp.bfloat16)
    moved = Tensor(2)(Orthogonal(3), R, T)
    assert moved.dtype == jnp.bfloat16
    exact = Tensor(2)(Orthogonal(3), R, T.astype(jnp.float32))
    np.testing.assert_array_equal(moved, exact.astype(jnp.bfloat16))


def test_pixels_that_only_move_stay_integers():
    pixels = jnp.arange(16, dtype=jnp.uint8).reshape(4, 4)
    assert Image()(Cyclic(4), 1, pixels).dtype == jnp.uint8
    assert Vector()(Cyclic(8), 1, jnp.array([1, 0])).tolist() == pytest.approx([0.5**0.5, 0.5**0.5])


def test_equal_representations_compare_and_hash_equal():
    assert Sum((1, Trivial())) == Sum([(1, Trivial())])
    values = {
        Trivial(),
        Image(),
        Image(),
        Regular(),
        Vector(),
        Vector(copies=2),
        Sum((1, Trivial())),
    }
    assert len(values) == 6


@pytest.mark.parametrize(
    ("representation", "group", "message"),
    [
        (Image(), Cyclic(3), r"interpolate.*Cyclic\(1\), Cyclic\(2\) or Cyclic\(4\)"),
        (Image(), Dihedral(8), "interpolate"),
        (Image(), Orthogonal(2), r"Cyclic, Dihedral and Translation.*Vector\(\)"),
        (Vector(), Translation((4, 4)), r"Orthogonal\(3\).*Image\(\)"),
        (Tensor(2), Translation((4, 4)), "needs a group with matrices"),
        (Permute(), Cyclic(4), "groups that permute things"),
        (Regular(), Orthogonal(3), "elements are numbers"),
        (Regular(), Permutation(3), "elements are numbers"),
        (Regular(), Cyclic(3), "interpolate"),
        (Regular(), CUBE, "Cyclic, Dihedral and Translation"),
        (Sum((3, Vector()), (4, Image())), Orthogonal(3), "Cyclic, Dihedral and Translation"),
    ],
)
def test_groups_that_cannot_act_in_this_way_are_refused(representation, group, message):
    with pytest.raises((TypeError, ValueError), match=message):
        representation.check(group)


@pytest.mark.parametrize(
    ("representation", "group", "shape", "message"),
    [
        (Image(), Cyclic(4), (4, 5, 1), r"square maps, got shape \(4, 5, 1\).*Cyclic\(2\)"),
        (Image(), Dihedral(4), (10,), r"got shape \(10,\).*Trivial\(\)"),
        (Image(), Translation((4, 4)), (4, 5, 1), r"grid as the first axes.*\(4, 5, 1\)"),
        (Vector(), Orthogonal(3), (4,), r"one or more vectors of 3 entries.*\(4,\)"),
        (Vector(copies=2), Orthogonal(3), (9,), "needs 2 vectors of 3"),
        (Vector(), Orthogonal(3), (), "got shape"),
        (Tensor(2), Orthogonal(3), (3, 4), r"\(..., 3, 3\) or \(..., k\*9\).*\(3, 4\)"),
        (Regular(), Cyclic(4), (4, 4, 6), r"multiple of 4 channels.*\(4, 4, 6\)"),
        (Regular(), Cyclic(4), (4, 4), "after height and width"),
        (Permute(), Permutation(4), (3, 4), r"needs 4 entries.*\(3, 4\)"),
        (Permute(axis=2), Permutation(4), (4,), "needs 4 entries"),
        (Sum((5, Trivial()), (15, Vector())), Orthogonal(3), (21,), r"\[5, 15\].*20.*\(21,\)"),
    ],
)
def test_arrays_of_the_wrong_shape_are_refused(representation, group, shape, message):
    with pytest.raises(ValueError, match=message):
        representation(group, group.identity, jnp.zeros(shape))


@pytest.mark.parametrize(
    "build",
    [
        lambda: Sum(),
        lambda: Sum([]),
        lambda: Sum(5, Trivial()),
        lambda: Sum((0, Trivial())),
        lambda: Sum((5, "vector")),
        lambda: Sum((Trivial(), 5)),
        lambda: Tensor(-1),
        lambda: Tensor(1.5),
        lambda: Vector(copies=0),
        lambda: Regular(base=Vector()),
    ],
)
def test_wrong_arguments_are_refused_when_built(build):
    with pytest.raises((TypeError, ValueError), match=r"got|at least one"):
        build()


def test_a_user_can_write_a_representation():
    @dataclasses.dataclass(frozen=True)
    class Determinant(Representation):
        def __call__(self, group, element, array):
            return jnp.linalg.det(group.matrix(element)) * array

    reflection = jnp.diag(jnp.array([-1.0, 1.0, 1.0]))
    both = Sum((3, Vector()), (1, Determinant()))
    both.check(Orthogonal(3))
    np.testing.assert_array_equal(both(Orthogonal(3), reflection, jnp.ones(4)), [-1, 1, 1, -1])
