"""What a loop over equal blocks sends between devices that share its parameters."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from constrainx.models import Swin
from constrainx.plan._collectives import read_collectives
from constrainx.runtime import Sharding


def make_model():
    """Just wide enough for all kernels to be split, with activations larger than they are."""
    return Swin(
        size=16,
        patch=2,
        width=128,
        depths=(4,),
        heads=(2,),
        window=2,
        classes=8,
        drop_path=0.0,
        scan=True,
        rngs=nnx.Rngs(0),
    )


@pytest.fixture(scope="module")
def differentiate():
    graph = nnx.graphdef(nnx.eval_shape(make_model))

    def differentiate(state, x):
        return jax.grad(lambda state: jnp.sum(nnx.merge(graph, state)(x) ** 2))(state)

    return differentiate


@pytest.fixture(scope="module")
def state():
    return nnx.state(nnx.jit(make_model)())


@pytest.fixture(scope="module")
def x():
    return np.random.default_rng(0).normal(size=(64, 16, 16, 3)).astype(np.float32)


@pytest.fixture(scope="module")
def sharding():
    return Sharding.over(devices=8, fsdp=8)


@pytest.fixture(scope="module")
def compiled(differentiate, state, x, sharding):
    step = jax.jit(differentiate, out_shardings=sharding.of_state(state))
    return step.lower(sharding.shapes(state), sharding.shapes_of_batch(x)).compile()


def test_a_loop_sends_parameters_and_no_activations(compiled, state):
    sent = collections.Counter()
    for one in read_collectives(compiled.as_text()):
        sent[one.kind] += one.bytes * one.times
    parameters = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    # Once for the forward pass and once for the backward pass.
    assert 0.5 * parameters < sent["all-gather"] < 2.1 * parameters, sent
    gradients = sent["all-reduce"] + sent["reduce-scatter"]
    assert 0.5 * parameters < gradients < 1.1 * parameters, sent
    assert not {*sent} - {"all-gather", "all-reduce", "reduce-scatter"}


def test_a_loop_computes_the_same_on_many_devices(compiled, differentiate, state, x, sharding):
    found = compiled(sharding.place(state), sharding.place_batch(x))
    expected = jax.jit(differentiate)(state, x)
    largest = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(expected))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6 * largest),
        found,
        expected,
    )
