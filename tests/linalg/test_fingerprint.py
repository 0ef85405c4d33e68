"""Equal fingerprints mean equal programs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from constrainx.linalg._fingerprint import fingerprint

x = jnp.ones(3)
CONSTANT = np.arange(3.0, dtype=np.float32)


def of(function):
    return fingerprint(jax.make_jaxpr(function)(x))


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (lambda v: 2.0 * v, lambda v: 3.0 * v),
        (lambda v: v * 0.0, lambda v: v * -0.0),
        (lambda v: v + v[0], lambda v: v + v[1]),
        (lambda v: v - 2 * v, lambda v: 2 * v - v),
        (lambda v: jnp.sum(v), lambda v: jnp.max(v)),
        (lambda v: v.astype(jnp.float16), lambda v: v.astype(jnp.bfloat16)),
        (lambda v: jax.jit(lambda w: 2.0 * w)(v), lambda v: jax.jit(lambda w: 3.0 * w)(v)),
        (lambda v: jnp.reshape(v, (3, 1)), lambda v: jnp.reshape(v, (1, 3))),
        (lambda v: (v, 2 * v), lambda v: (2 * v, v)),
    ],
)
def test_different_programs_have_different_fingerprints(left, right):
    assert of(left) != of(right)


def test_a_program_traced_twice_has_one_fingerprint():
    def program():
        return lambda v: jax.jit(lambda w: jnp.cumsum(w) * 2.0)(v) + jnp.where(v > 0, v, 0.0)

    assert of(program()) == of(program())
    assert hash(of(program())) == hash(of(program()))


def test_programs_with_arrays_inside_are_never_equal():
    assert of(lambda v: v * CONSTANT) != of(lambda v: v * CONSTANT)
