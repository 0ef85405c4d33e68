"""The Jacobian by slices of many kinds of layers, against the dense one of `jax.jacrev`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from constrainx.step import _blocks as blocks
from constrainx.step import _jacobian as jacobian

from .zoo import FACTORED, ROUNDED, ZOO

# Norm of the difference by norm of the reference. In bfloat16 a product has two to three digits,
# and JAX rounds each gradient where the factors are multiplied in float32.
TOLERANCES = {"float64": 1e-11, "float32": 1e-5, "bfloat16": 2e-2}


def compare(layer, dtype, rows, examples):
    """All products as they are found, the dense Jacobian, and the vectors of the products."""
    x = np.random.default_rng(0).normal(size=(rows, examples, *layer.inputs))
    wide = jnp.result_type(dtype, jnp.float32)

    def row(parameters, piece):
        output = layer.apply(parameters, piece)
        return jnp.sum(jnp.sin(output + jnp.arange(output.size).reshape(output.shape)))

    def sums(parameters):
        leaves = jax.tree.leaves(parameters)
        return jnp.stack([sum(jnp.sum(leaf**power) for leaf in leaves) for power in (1, 2)])

    def flatten(tree, *shape):
        leaves = [leaf.astype(wide).reshape(*shape, -1) for leaf in jax.tree.leaves(tree)]
        return jnp.concatenate(leaves, axis=-1)

    # Two compilations: in one, XLA may spare one use of an array the rounding to bfloat16, and
    # not another.
    @jax.jit
    def linearise(parameters, slices):
        by_rows = jax.vmap(row, in_axes=(None, 0))
        dense = [
            flatten(jax.jacrev(by_rows)(parameters, slices), rows),
            flatten(jax.tree.map(jnp.ones_like, parameters), 1),
            flatten(jax.tree.map(lambda leaf: 2 * leaf, parameters), 1),
        ]
        parts = (
            jacobian.rows_of_slices(row, parameters, slices),
            jacobian.rows_of(sums, parameters),
        )
        stacked = jacobian.StackedJacobian(parts)
        vectors = (
            jax.tree.map(jnp.cos, parameters),
            jax.tree.map(jnp.exp, parameters),
            jnp.arange(1, rows + 3, dtype=dtype),
        )
        return stacked, by_rows(parameters, slices), jnp.concatenate(dense), vectors

    @jax.jit
    def multiply(stacked, parameters, update, metric, weights):
        found = {
            "values": stacked.parts[0].values,
            "gram": stacked.gram(),
            "gram in a metric": stacked.gram(metric),
            "matvec": stacked.matvec(update),
            "rmatvec": flatten(stacked.rmatvec(weights, parameters)),
            "materialise": stacked.materialise(parameters),
        }
        return found, (flatten(update), flatten(metric), weights)

    stacked, values, dense, vectors = linearise(layer.parameters, jnp.asarray(x, dtype))
    found, vectors = multiply(stacked, layer.parameters, *vectors)
    results = found, values, dense, vectors
    return jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), results)


def multiply_out(dense, update, metric, weights):
    return {
        "gram": dense @ dense.T,
        "gram in a metric": (dense * metric) @ dense.T,
        "matvec": dense @ update,
        "rmatvec": weights @ dense,
        "materialise": dense,
    }


def assert_near(found, wanted, tolerance):
    for key, reference in wanted.items():
        error = np.linalg.norm(found[key] - reference)
        assert error <= tolerance * np.linalg.norm(reference), (key, error)


def check(name, dtype, rows, examples):
    found, values, dense, vectors = compare(ZOO[name](jnp.dtype(dtype)), dtype, rows, examples)
    wanted = {"values": values, **multiply_out(dense, *vectors)}
    tolerance = TOLERANCES["bfloat16" if name in ROUNDED else dtype]
    assert_near(found, wanted, tolerance)
    # Each row alone, for the second Jacobian has longer ones.
    assert_near(found["materialise"], dict(enumerate(dense)), tolerance)
    # Whatever precision the gradients have, their products have at least that of float32.
    is_double = dtype == "float64" and name not in ROUNDED
    own = multiply_out(found["materialise"], *vectors)
    assert_near(found, own, TOLERANCES["float64" if is_double else "float32"])


@pytest.fixture
def all_factored(monkeypatch):
    """Factors wherever it can be done: on layers as small as these it never pays."""
    seen = []

    def find(*arguments):
        seen.append(find_taps(*arguments))
        return seen[-1]

    find_taps = jacobian.find_taps
    monkeypatch.setattr(jacobian, "find_taps", find)
    monkeypatch.setattr(jacobian, "is_worth_factoring", lambda *arguments: True)
    return seen


@pytest.mark.parametrize("name", ZOO)
def test_several_examples_a_slice(x64, all_factored, name):
    check(name, "float64", rows=3, examples=2)
    assert len(all_factored[0]) == FACTORED[name]


@pytest.mark.parametrize(
    "name",
    [
        *(name for name, count in FACTORED.items() if count),
        "kernel_and_its_transpose",
        "attention",
        "gru",
        "kernel_rounded_and_widened",
        "kernel_in_eight_bits",
        "complex_convolution",
        "masked_weights",
    ],
)
def test_rows_of_single_examples_match_their_gradients(all_factored, name):
    check(name, "float32", rows=4, examples=1)


@pytest.mark.parametrize(
    "name",
    [
        "mlp",
        "kernel_shared_by_two_layers",
        "kernel_and_its_transpose",
        "convolutions_in_two_dimensions",
        "complex_activations",
        "kernel_rounded_and_widened",
        "jit_inside_remat_with_a_policy",
    ],
)
def test_parameters_in_bfloat16(all_factored, name):
    check(name, "bfloat16", rows=2, examples=2)


@pytest.mark.parametrize("name", ["kernels_of_no_width", "convolutions_of_no_width"])
def test_kernels_of_zero_width_are_handled(name):
    check(name, "float32", rows=3, examples=1)


@pytest.mark.parametrize("rows", [1, 3])
def test_products_have_more_digits_than_bfloat16(rows):
    # Without `jax.jit`, where XLA leaves out the rounding between two operations.
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.bfloat16)  # noqa: E731
    stored = blocks.Stored(draw(rows, 5, 4))
    factored = blocks.Factored(draw(rows, 2, 5), draw(rows, 1, 2, 4))
    weights, metric = draw(rows), draw(5, 4)
    for block in (stored, factored):
        dense = np.asarray(blocks.materialise(block, metric, rows), np.float64)
        scaled = dense * np.asarray(metric, np.float64)
        np.testing.assert_allclose(
            blocks.correlate(block, block, metric),
            np.einsum("kio,lio->kl", dense, scaled), rtol=1e-4,
        )  # fmt: skip
        np.testing.assert_allclose(
            blocks.combine(block, weights),
            np.einsum("k,kio->io", np.asarray(weights, np.float64), dense), rtol=1e-4, atol=1e-5,
        )  # fmt: skip


def test_gradients_rounded_on_the_way_are_those_of_jax(all_factored):
    layer = ZOO["kernel_rounded_and_widened"](jnp.float32)
    found, _, dense, _ = compare(layer, "float32", rows=2, examples=1)
    np.testing.assert_array_equal(found["materialise"], dense)


def test_remat_still_recomputes(all_factored):
    def row(w, x):
        return jnp.sum(jax.checkpoint(lambda w, x: jnp.sin(jnp.tanh(x @ w)))(w, x))

    def rows(w, slices):
        return jacobian.rows_of_slices(row, w, slices)

    w, slices = jnp.ones((3, 4)), jnp.ones((2, 1, 3))
    (block,) = rows(w, slices).blocks
    assert isinstance(block, blocks.Factored)
    text = str(jax.make_jaxpr(rows)(w, slices))
    assert "differentiated=True" in text
    # Once forwards, and again backwards.
    assert text.count("tanh") == 2


def test_layers_of_a_function_with_shardings_are_left_in_it(all_factored):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), "x")
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    sharded = jax.jit(lambda w, x: x @ w, in_shardings=(sharding, sharding))
    w, slices = jnp.ones((3, 4)), jnp.ones((2, 1, 3))
    found = jacobian.rows_of_slices(lambda w, x: jnp.sum(sharded(w, x)), w, slices)
    np.testing.assert_allclose(found.blocks[0].gradients, np.ones((2, 3, 4)))


@pytest.mark.parametrize("name", ["mlp", "inside_remat"])
def test_gram_matrix_can_be_differentiated(x64, all_factored, name):
    layer = ZOO[name](jnp.dtype("float64"))
    slices = jnp.asarray(np.random.default_rng(0).normal(size=(2, 1, *layer.inputs)))

    def row(p, piece):
        return jnp.sum(jnp.sin(layer.apply(p, piece)))

    def by_slices(p):
        found = jacobian.rows_of_slices(row, p, slices)
        return jnp.sum(jnp.sin(jacobian.StackedJacobian((found,)).gram())) + found.values @ weights

    def dense(p):
        found = jacobian.rows_of(lambda p: jax.vmap(row, in_axes=(None, 0))(p, slices), p)
        return jnp.sum(jnp.sin(jacobian.StackedJacobian((found,)).gram())) + found.values @ weights

    weights = jnp.array([1.0, 2.0])
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-10, atol=1e-13),
        *jax.jit(lambda p: (jax.grad(by_slices)(p), jax.grad(dense)(p)))(layer.parameters),
    )
