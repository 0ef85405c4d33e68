"""Choosing the largest of many numbers against a sort."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from constrainx import masks
from constrainx.constraints.masks._pattern import keep_in_groups, parse_pattern
from constrainx.constraints.masks._select import (
    COUNTED,
    find_cut,
    find_expected_cut,
    keep_largest,
)
from constrainx.errors import ArgumentError
from constrainx.plan import read_collectives

SHAPES = ((7, 11), (5,), (3, 4, 6), (5,), (7, 11))
SIZE = sum(int(np.prod(shape)) for shape in SHAPES)


def draw(seed, *, digits):
    rng = np.random.default_rng(seed)
    arrays = [np.round(rng.normal(size=shape), digits).astype(np.float32) for shape in SHAPES]
    return [jnp.asarray(array) for array in arrays]


def flatten(arrays):
    return np.concatenate([np.ravel(array) for array in arrays])


@pytest.mark.parametrize("digits", [0, 1, 6], ids="digits {}".format)
def test_exactly_as_many_are_kept_as_a_stable_sort_would_keep(digits):
    values, ties = draw(0, digits=digits), draw(1, digits=digits)
    keep = jax.jit(keep_largest)
    order = np.lexsort((np.arange(SIZE), -flatten(ties), -flatten(values)))
    for count in (0, 1, SIZE // 3, SIZE - 1, SIZE):
        expected = np.zeros(SIZE, bool)
        expected[order[:count]] = True
        np.testing.assert_array_equal(flatten(keep(values, ties, count)), expected)


def test_equal_and_infinite_numbers_are_counted_right():
    values = [jnp.array([jnp.inf, -jnp.inf, 2.0, -1.0, 2.0, jnp.nan, 0.0, -0.0])]
    kept = jax.jit(keep_largest)(values, [jnp.zeros(8)], 5)
    np.testing.assert_array_equal(kept[0], [True, False, True, False, True, False, True, True])


@pytest.mark.parametrize("share", [0.001, 0.1, 0.5, 0.999])
def test_a_cut_is_exact_for_few_numbers(share):
    values = draw(2, digits=6)
    count = round(share * SIZE)
    cut = jax.jit(find_cut)(values, jnp.asarray(count))
    assert np.sum(flatten(values) >= float(cut)) == count


@pytest.mark.parametrize("share", [0.0, 0.01, 0.1, 0.5, 1.0])
def test_a_cut_is_close_for_many_numbers(share):
    rng = np.random.default_rng(3)
    # Heavy tails, layers of different sizes and scales.
    values = [
        jnp.asarray((scale * np.exp(2 * rng.normal(size=shape))).astype(np.float32))
        for scale, shape in ((1, (3, 3, 64, 128)), (0.1, (512, 256)), (5, (64, 999)))
    ]
    size = sum(value.size for value in values)
    cut = jax.jit(find_cut)(values, jnp.asarray(round(share * size)))
    kept = sum(int(jnp.sum(value >= cut)) for value in values) / size
    assert abs(kept - share) < 5e-4


@pytest.mark.parametrize("density", [0.001, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("seed", range(3))
def test_frozen_masks_of_many_weights_keep_what_was_frozen(seed, density):
    # A sample of the masks has not quite the density of all, and there is nothing between.
    kept = np.random.default_rng(seed).random((500, 400)) < density
    model = nnx.Linear(500, 400, rngs=nnx.Rngs(0))
    masks.add_masks(model, initial=lambda w: jnp.where(jnp.asarray(kept), 2.0, -1.0))
    np.testing.assert_array_equal(masks.top(model).kernel[...] != 0, kept)


@pytest.mark.parametrize(
    ("levels", "shares", "expected"),
    [((0.9, 0.1), (0.1, 0.9), 0.1), ((0.9, 0.1), (0.9, 0.1), 0.9), ((0.6, 0.6), (0.5, 0.5), 1.0)],
)
def test_equal_probabilities_stay_or_go_together_whichever_is_closer(levels, shares, expected):
    is_first = jnp.arange(100_000) % 10 < 10 * shares[0]
    cut = jax.jit(find_expected_cut)([jnp.where(is_first, *levels)])
    assert jnp.mean(jnp.where(is_first, *levels) >= cut) == pytest.approx(expected)


@pytest.mark.parametrize("scale", [0.3, 1.0, 20.0])
def test_as_many_are_kept_as_the_probabilities_add_up_to(scale):
    p = jnp.asarray(np.random.default_rng(5).normal(size=(400, 500)) * scale, jnp.float32)
    cut = jax.jit(find_expected_cut)([p])
    assert abs(float(jnp.mean(p >= cut)) - float(jnp.mean(jnp.clip(p, 0, 1)))) < 1e-3


def test_the_largest_of_each_group_are_kept():
    rng = np.random.default_rng(4)
    kernel = np.round(rng.normal(size=(3, 8, 5)), 1).astype(np.float32)
    kept = jax.jit(lambda k: keep_in_groups(k, jnp.abs(k), 4, 2))(jnp.asarray(kernel))
    groups = np.asarray(kept).reshape(3, 2, 4, 5)
    np.testing.assert_array_equal(groups.sum(axis=2), 2)
    values = kernel.reshape(3, 2, 4, 5)
    least_kept = np.where(groups, values, np.inf).min(axis=2)
    most_dropped = np.where(groups, -np.inf, values).max(axis=2)
    assert (least_kept >= most_dropped).all()


@pytest.mark.parametrize("text", ["4:2", "2:2", "0:4", "2-4", "two of four", 2])
def test_a_pattern_that_means_nothing_is_refused(text):
    with pytest.raises(ArgumentError, match="2:4"):
        parse_pattern(text)


def test_devices_exchange_a_sample_and_not_the_values():
    """A kernel in eight parts, of which every third number is counted, and every 161st sorted."""
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))
    values = jax.random.normal(jax.random.key(0), (2560, 2048))
    assert values.size > 2 * COUNTED
    placed = jax.device_put(values, NamedSharding(mesh, PartitionSpec(None, "fsdp")))
    find = jax.jit(lambda v: find_cut([v], v.size // 3)).lower(placed).compile()
    exchanged = read_collectives(find.as_text())
    assert sum(one.bytes for one in exchanged) < 0.4 * values.nbytes
    assert find(placed) == find_cut([values], values.size // 3)
