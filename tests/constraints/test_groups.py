"""Groups obey the axioms, are sampled uniformly, and refuse what is not a group."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from constrainx.constraints import groups
from constrainx.constraints.groups import (
    Cyclic,
    Dihedral,
    MatrixGroup,
    Orthogonal,
    Permutation,
    SpecialOrthogonal,
    Translation,
)
from constrainx.constraints.representations import Regular, Trivial

TURN_X = [[1, 0, 0], [0, 0, -1], [0, 1, 0]]
TURN_Z = [[0, -1, 0], [1, 0, 0], [0, 0, 1]]
CUBE = MatrixGroup.generated_by([TURN_X, TURN_Z])
THIRD = np.array([[-0.5, -np.sqrt(0.75)], [np.sqrt(0.75), -0.5]])
# The identity is not the first element here.
TRIANGLE = MatrixGroup([THIRD, np.eye(2), THIRD @ THIRD])

FINITE = [
    *map(Cyclic, (1, 4, 7)),
    *map(Dihedral, (1, 2, 5)),
    *map(Permutation, (1, 2, 4)),
    Translation((3, 1, 4)),
    TRIANGLE,
    CUBE,
]
CONTINUOUS = [Orthogonal(1), Orthogonal(3), SpecialOrthogonal(2), SpecialOrthogonal(3)]


def name(group):
    return str(group) if not isinstance(group, MatrixGroup) else f"MatrixGroup of {group.order}"


@functools.cache
def measure_axioms(group):
    """Compiles a function that returns the largest error in each law, over a few elements."""

    def laws(a, b, c):
        compose, inverse, one = group.compose, group.inverse, jnp.asarray(group.identity)
        pairs = {
            "associative": (compose(compose(a, b), c), compose(a, compose(b, c))),
            "right identity": (compose(a, one), a),
            "left identity": (compose(one, a), a),
            "right inverse": (compose(a, inverse(a)), one),
            "left inverse": (compose(inverse(a), a), one),
        }
        if group.dimension:
            M, product = group.matrix, functools.partial(jnp.matmul, precision="highest")
            pairs |= {
                "matrix product": (M(compose(a, b)), product(M(a), M(b))),
                "matrix of identity": (M(one), jnp.eye(group.dimension)),
                "matrix orthogonal": (product(M(a), M(a).T), jnp.eye(group.dimension)),
            }
        return {law: jnp.max(jnp.abs(left - right)) for law, (left, right) in pairs.items()}

    return jax.jit(jax.vmap(laws))


@pytest.mark.parametrize("group", FINITE + CONTINUOUS, ids=name)
@given(seed=st.integers(0, 2**31 - 1))
@settings(max_examples=15, deadline=None)
def test_products_inverses_and_matrices_obey_the_group_axioms(group, seed):
    if isinstance(group, groups.FiniteGroup):
        # NumPy, since compiling a random generator for each group takes seconds.
        samples = group.elements[np.random.default_rng(seed).integers(group.order, size=24)]
    else:
        samples = np.asarray(group.sample(jax.random.key(seed), 24))
    triples = samples.reshape(3, 8, *np.shape(group.identity))
    for law, errors in measure_axioms(group)(*triples).items():
        np.testing.assert_array_less(errors, 5e-6, err_msg=law)


@functools.cache
def compiled_product(group):
    return jax.jit(group.compose)


def as_set(elements):
    return {tuple(np.ravel(element).tolist()) for element in elements}


@pytest.mark.parametrize("group", FINITE, ids=name)
def test_elements_lists_each_element_once_and_is_closed(group):
    elements = as_set(group.elements)
    assert len(group.elements) == len(elements) == group.order
    assert as_set([group.identity]) <= elements
    for a in group.elements[:5]:
        assert as_set(compiled_product(group)(a, b) for b in group.elements) == elements


@pytest.mark.parametrize("group", FINITE, ids=name)
def test_products_of_generators_reach_every_element(group):
    found = [np.asarray(group.identity)]
    seen = as_set(found)
    for element, generator in ((e, g) for e in found for g in group.generators):
        product = np.asarray(compiled_product(group)(element, generator))
        if not as_set([product]) <= seen:
            seen |= as_set([product])
            found.append(product)
    assert len(seen) == group.order
    assert len(group.generators) <= max(3, group.order - 1)


@pytest.mark.parametrize("group", [Dihedral(3), Permutation(3), Translation((2, 3))], ids=name)
def test_samples_of_finite_groups_are_uniform(group):
    samples = group.sample(jax.random.key(0), 6000)
    assert samples.shape == (6000, *group.elements.shape[1:])
    rows, counts = np.unique(np.asarray(samples).reshape(6000, -1), axis=0, return_counts=True)
    assert as_set(rows) == as_set(group.elements)
    assert scipy.stats.chisquare(counts).pvalue > 1e-3


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("kind", [Orthogonal, SpecialOrthogonal])
def test_moments_are_those_of_the_haar_measure(kind, n):
    """E R = 0, E R_ij R_kl = δ_ik δ_jl / n, E R_ij⁴ = 3 / (n (n + 2)), to five standard errors."""
    count = 50_000
    flat = np.asarray(kind(n).sample(jax.random.key(n), count), np.float64).reshape(count, -1)

    def within(mean, square, expected):
        error = np.sqrt(np.maximum(square - mean**2, 0) / count)
        np.testing.assert_array_less(np.abs(mean - expected), 5 * error + 1e-7)

    within(flat.mean(axis=0), (flat**2).mean(axis=0), 0)
    expected = np.eye(n * n) / n
    if kind is SpecialOrthogonal and n == 2:
        # In the plane R = [[c, −s], [s, c]], so that there are further correlations.
        expected[0, 3] = expected[3, 0] = 1 / 2
        expected[1, 2] = expected[2, 1] = -1 / 2
    within(flat.T @ flat / count, (flat**2).T @ flat**2 / count, expected)
    within((flat**4).mean(axis=0), (flat**8).mean(axis=0), 3 / (n * (n + 2)))


@pytest.mark.parametrize("n", [1, 3])
def test_half_of_the_orthogonal_samples_are_reflections_and_no_rotation_is(n):
    count = 50_000
    key = jax.random.key(1)
    signs = np.linalg.det(np.asarray(Orthogonal(n).sample(key, count), np.float64))
    np.testing.assert_allclose(np.abs(signs), 1, atol=1e-5)
    # Half of each: the standard deviation of the mean sign is 1/√count.
    assert abs(np.mean(np.sign(signs))) < 4 / np.sqrt(count)
    rotations = np.asarray(SpecialOrthogonal(n).sample(key, count), np.float64)
    np.testing.assert_allclose(np.linalg.det(rotations), 1, atol=1e-5)


def test_angles_of_haar_rotations_have_the_known_distribution():
    """The angle of a Haar rotation has the distribution function (θ − sin θ)/π."""
    rotations = np.asarray(SpecialOrthogonal(3).sample(jax.random.key(3), 50_000), np.float64)
    angles = np.arccos(np.clip((np.trace(rotations, axis1=1, axis2=2) - 1) / 2, -1, 1))
    law = scipy.stats.kstest(angles, lambda t: (t - np.sin(t)) / np.pi)
    assert law.pvalue > 1e-3


def test_samples_are_double_precision_where_jax_is(x64):
    rotation = SpecialOrthogonal(3).sample(jax.random.key(0), 1)[0]
    np.testing.assert_allclose(rotation.T @ rotation, np.eye(3), atol=1e-14)


def test_matrices_of_quarter_turns_are_exact():
    np.testing.assert_array_equal(Cyclic(4).matrix(1), [[0, -1], [1, 0]])
    np.testing.assert_array_equal(Dihedral(4).matrix(4), [[-1, 0], [0, 1]])


def test_a_permutation_moves_entries_to_their_images():
    np.testing.assert_array_equal(
        Permutation(3).matrix(np.array([1, 2, 0])) @ jnp.arange(3), [2, 0, 1]
    )


def test_equal_groups_compare_and_hash_equal():
    assert len({Cyclic(4), Cyclic(4), Dihedral(4), Translation([2, 3]), Translation((2, 3))}) == 3
    assert MatrixGroup(np.stack([np.eye(2), -np.eye(2)])) == MatrixGroup(
        [[[1, 0], [0, 1]], [[-1, 0], [0, -1]]]
    )
    assert hash(CUBE) == hash(MatrixGroup(CUBE.matrices))


def test_two_quarter_turns_generate_the_24_rotations_of_a_cube():
    assert CUBE.order == 24
    matrices = np.asarray(jax.vmap(CUBE.matrix)(CUBE.elements))
    np.testing.assert_allclose(np.linalg.det(matrices), 1, atol=1e-6)


@pytest.mark.parametrize("n", [0, -1, 2.5, True, "4"])
@pytest.mark.parametrize("kind", [Cyclic, Dihedral, Orthogonal, SpecialOrthogonal, Permutation])
def test_sizes_other_than_positive_integers_are_refused(kind, n):
    with pytest.raises(
        ValueError, match=rf"`{kind.__name__}\(n=...\)` must be an integer of at least 1, got {n!r}"
    ):
        kind(n)


@pytest.mark.parametrize("shape", [(), 4, (3, 0)])
def test_a_translation_without_a_grid_is_refused(shape):
    with pytest.raises(ValueError, match=r"`Translation\(shape=...\)`"):
        Translation(shape)


def test_a_translation_has_no_matrix():
    with pytest.raises(TypeError, match=r"Image\(\)"):
        Translation((2, 2)).matrix(np.zeros(2, int))


def test_permutations_of_nine_things_can_be_sampled_but_not_listed():
    with pytest.raises(ValueError, match=r"362880 elements.*sample"):
        _ = Permutation(9).elements
    assert Permutation(50).sample(jax.random.key(0), 2).shape == (2, 50)


@pytest.mark.parametrize(
    ("matrices", "message"),
    [
        ([np.eye(2), THIRD], r"not closed.*matrices\[1\] @ matrices\[1\].*generated_by"),
        ([THIRD, THIRD @ THIRD], "not closed"),
        ([np.eye(2), np.diag([1, 0])], r"matrices\[1\] has no inverse"),
        ([np.eye(2), np.eye(2)], r"matrices\[1\] equals matrices\[0\]"),
        ([[[1, 0]]], r"shape \(order, n, n\), got shape \(1, 1, 2\)"),
        (np.eye(2), r"got shape \(2, 2\)"),
        ([np.eye(2), np.eye(3)], "of one shape"),
        ([[[np.nan]]], "finite"),
    ],
)
def test_matrices_that_do_not_form_a_group_are_refused(matrices, message):
    with pytest.raises(ValueError, match=message):
        MatrixGroup(matrices)


def test_generating_an_infinite_group_stops_with_an_error():
    angle = 1.0
    rotation = [[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]]
    with pytest.raises(ValueError, match="more than most=50"):
        MatrixGroup.generated_by([rotation], most=50)


def test_a_user_can_write_a_group():
    class Signs(groups.FiniteGroup):
        dimension, identity, order = 1, 1, 2
        elements = np.array([1, -1])
        generators = np.array([-1])

        def compose(self, g, h):
            return g * h

        def inverse(self, g):
            return g

        def matrix(self, g):
            return jnp.full((1, 1), g, float)

        def sample(self, key, count):
            return jax.random.rademacher(key, (count,))

    assert Signs().compose(-1, -1) == Signs().identity
    # Elements are the positions of channels in the regular representation, which −1 is not.
    with pytest.raises(TypeError, match="numbers from 0 up"):
        Regular(base=Trivial()).check(Signs())
