"""The rivals of `continual-fmnist`, and that it resumes exactly."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from constrainx.models import MLP
from constrainx.recipes._continual import Learner
from constrainx.recipes.continual_fmnist import ContinualFMNIST


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(12, 5)).astype(np.float32)
    return {"x": jnp.asarray(x), "y": jnp.asarray(rng.integers(0, 3, 12), jnp.int32)}


def learn(keeps, data, share=0.0):
    """A learner at the end of its first task, of two, which was one batch."""
    network = MLP((5, 7, 3), activation=nnx.relu, rngs=nnx.Rngs(0))
    learner = Learner(network, example=jnp.zeros(5), size=20, tasks=2, period=1, keeps=keeps)

    @nnx.jit
    def observe(learner):
        learner.observe(data, jax.random.key(0), share=share)

    observe(learner)
    return learner


def test_importance_is_the_mean_of_squared_gradients(data):
    learner = learn("importance", data)
    graph, parameters = nnx.split(learner.network)

    def log_p(p, x, y):
        return jax.nn.log_softmax(nnx.merge(graph, p)(x[None]))[0, y]

    one_by_one = jax.vmap(jax.grad(log_p), in_axes=(None, 0, 0))(parameters, data["x"], data["y"])
    for found, gradients in zip(learner.importance, jax.tree.leaves(one_by_one), strict=True):
        np.testing.assert_allclose(found[...], np.mean(np.square(gradients), 0), atol=1e-6)
    # What it was is kept, and so are the logits of the examples.
    kept, weights = learner.memory.everything()
    np.testing.assert_allclose(kept["outputs"][:12], learner(data["x"]), atol=1e-6)
    assert weights.tolist() == [1] * 12 + [0] * 8
    learner.network.layers[0].kernel[...] += 0.1
    drift = sum(np.sum(f[...]) for f in learner.importance[1:2]) * 0.1**2 / 2
    np.testing.assert_allclose(learner.drift(), drift, rtol=1e-4)
    assert float(jnp.abs(learner.recall(0)(data["x"]) - learner(data["x"])).max()) > 0.1


def test_updates_in_the_null_space_of_inputs_change_nothing(data):
    few = {name: leaf[:4] for name, leaf in data.items()}
    learner = learn("inputs", few, share=1e-5)
    inputs = few["x"]
    for layer, projector in zip(learner.network.layers, learner.projectors, strict=True):
        stacked = np.concatenate([inputs, np.ones((4, 1))], axis=1)
        free = len(projector[...]) - np.linalg.matrix_rank(stacked, tol=1e-4)
        assert free > 0
        np.testing.assert_allclose(np.trace(projector[...]), free, atol=1e-3)
        assert np.abs(stacked @ projector[...]).max() < 1e-3
        inputs = np.maximum(layer(inputs), 0)


@pytest.fixture(scope="module")
def short():
    return ContinualFMNIST(size="smoke", devices=2, epochs=1, save_every=7)


def test_a_run_that_resumes_is_the_same_bit_for_bit(short, tmp_path):
    """It stops in the second task, with rows from the memory."""
    whole = short.trainer(run=tmp_path / "run", progress=False)
    whole.fit()
    again = short.trainer(run=tmp_path / "run", progress=False)
    assert again.restore(7) == 7
    again.fit()
    for a, b in zip(jax.tree.leaves(whole.state), jax.tree.leaves(again.state), strict=True):
        np.testing.assert_array_equal(a, b)
    memory = again.model.memory
    assert int(memory.seen[...]) == 3 * 64
    assert set(np.unique(memory["ready"]).tolist()) == {1.0}
    figures = short.measure(again.model)
    assert 0 <= figures["accuracy"] <= 1
    assert figures["change"] > 0
