"""The check of array annotations that every other test runs under."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jaxtyping import Array, Float, PyTree, TypeCheckError, jaxtyped

from constrainx.models import MLP

from .array_annotations import check_arrays


@jaxtyped(typechecker=check_arrays)
def average(x: Float[Array, "points d"], *, count: int = 1) -> Float[Array, " d"]:
    return jnp.sum(x, axis=count - 1) / x.shape[0]


@jaxtyped(typechecker=check_arrays)
def first_leaf(tree: PyTree[Float[Array, "points ..."]] | None) -> Array:
    return tree["a"]


def test_the_library_is_checked():
    with pytest.raises(TypeCheckError, match="batch inputs"):
        MLP((3, 2), rngs=nnx.Rngs(0))(jnp.ones(3))


@pytest.mark.parametrize(
    "x",
    [jnp.ones(3), jnp.ones((2, 3), int), np.ones((2, 3), np.float32)],
    ids=["shape", "dtype", "not of JAX"],
)
def test_a_wrong_argument_is_found(x):
    with pytest.raises(TypeCheckError, match="parameter 'x'"):
        average(x)


def test_a_wrong_result_is_found():
    with pytest.raises(TypeCheckError, match="return value"):
        average(jnp.ones((2, 3)), count=2)


def test_a_wrong_leaf_is_found():
    first_leaf({"a": jnp.ones((2, 3)), "b": jnp.ones(2)})
    with pytest.raises(TypeCheckError, match="parameter 'tree'"):
        first_leaf({"a": jnp.ones((2, 3)), "b": jnp.ones(3)})


def test_what_is_no_array_is_left_to_the_library():
    np.testing.assert_allclose(average(jnp.ones((2, 3)), count=True), 1.0)
