"""Trainers of shapes alone, on devices that need not be there."""

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh

import constrainx as cx
from constrainx.models import MLP
from constrainx.recipes import build_abstract
from constrainx.recipes.conservative_score import ConservativeScore
from constrainx.recipes.o3_inertia import O3Inertia
from tests.distributed import small


def make_mesh(data, fsdp):
    devices = np.array(jax.devices()[: data * fsdp]).reshape(data, fsdp)
    return Mesh(devices, ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)


def test_its_step_is_that_of_a_trainer_with_arrays():
    concrete = small.trainer(devices=8, fsdp=2)
    model = nnx.eval_shape(lambda: MLP((8, 32, 32, 1), rngs=nnx.Rngs(0)))
    abstract = small.trainer(model=model, devices=8, fsdp=2)
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(abstract.state))
    assert abstract.lower().as_text() == concrete.lower().as_text()


def test_another_batch_can_be_asked_for():
    trainer = small.trainer()
    jaxpr = trainer.trace(batch=128).jaxpr
    assert (128, 8) in [value.shape for value in jaxpr.in_avals]
    with pytest.raises(ValueError, match="must be a multiple of the 8 devices"):
        trainer.lower(batch=100)


def test_it_cannot_train():
    model = nnx.eval_shape(lambda: MLP((8, 32, 32, 1), rngs=nnx.Rngs(0)))
    with pytest.raises(cx.errors.ArgumentError, match="`fit` needs parameters"):
        small.trainer(model=model).fit()


@pytest.mark.parametrize("kind", [O3Inertia, ConservativeScore], ids=lambda kind: kind.name)
def test_recipes_are_built_without_arrays(kind):
    """The second makes its data by JAX, and is built with arrays first."""
    trainer = build_abstract(kind(size="smoke"), make_mesh(2, 2))
    assert dict(trainer.sharding.mesh.shape) == {"data": 2, "fsdp": 2}
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(trainer.state))
    assert trainer.trace() is not None


def test_a_mesh_needs_its_two_axes():
    mesh = Mesh(np.array(jax.devices()), ("data",))
    with pytest.raises(ValueError, match=r'must have the axes \("data", "fsdp"\)'):
        cx.Devices(mesh=mesh)
    with pytest.raises(ValueError, match="leave out the other two"):
        cx.Devices(8, mesh=make_mesh(4, 2))
