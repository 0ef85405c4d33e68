"""The null-space step with a batch, or parameters, spread over eight devices."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import constrainx as cx
from constrainx.models import MLP


class Odd(cx.Constraint):
    def residual(self, model, batch, *, key):
        return model(batch["x"]) + model(-batch["x"])


@pytest.mark.parametrize("reduce", [cx.Norm(groups=8), "rms", "none"], ids=str)
@pytest.mark.parametrize("layout", ["data", "fsdp"])
def test_sharded_steps_match_one_device(x64, reduce, layout):
    mesh = jax.make_mesh((8,), (layout,), axis_types=(AxisType.Auto,))
    model = MLP((8, 32, 32, 1), rngs=nnx.Rngs(0))
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), nnx.state(model, nnx.Param))
    x = np.random.default_rng(0).normal(size=(24, 8))
    batch = {"x": x, "y": np.sin(x[:, :1])}
    solver = cx.LSMR(rtol=1e-14) if reduce == "none" else "auto"
    optimizer = cx.constrain(
        optax.adam(1e-3),
        Odd(gamma=0.5, reduce=reduce),
        model=model,
        method=cx.NullSpace(solver=solver),
    )
    graph = nnx.graphdef(model)

    def steps(params, batch):
        def step(carry, index):
            params, state = carry

            def loss(params):
                return jnp.mean((nnx.merge(graph, params)(batch["x"]) - batch["y"]) ** 2)

            updates, state = optimizer.update(
                jax.grad(loss)(params), state, params, batch=batch, key=jax.random.key(index)
            )
            return (optax.apply_updates(params, updates), state), None

        return jax.lax.scan(step, (params, optimizer.init(params)), jnp.arange(3))[0][0]

    run = jax.jit(steps)
    alone = run(params, batch)
    batch_sharding = NamedSharding(mesh, P(layout))
    sharded_batch = jax.tree.map(lambda leaf: jax.device_put(leaf, batch_sharding), batch)

    def place(leaf):
        spec = P(layout) if layout == "fsdp" and leaf.shape[0] % 8 == 0 else P()
        return jax.device_put(leaf, NamedSharding(mesh, spec))

    compiled = jax.jit(steps).lower(jax.tree.map(place, params), sharded_batch).compile()
    together = compiled(jax.tree.map(place, params), sharded_batch)
    for mine, other in zip(jax.tree.leaves(together), jax.tree.leaves(alone), strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-7, atol=1e-10)
    if layout == "data" and not isinstance(reduce, cx.Norm):
        # The gradients of rows on different devices have to meet for their inner products.
        size = sum(leaf.size for leaf in jax.tree.leaves(params))
        gathered = re.findall(r"= f64\[([0-9,]*)\][^=]* all-gather", compiled.as_text())
        counts = [np.prod([int(n) for n in dims.split(",")]) for dims in gathered if dims]
        assert all(count < size for count in counts), counts
