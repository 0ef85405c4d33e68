"""A constraint sees the model of now, in evaluation mode, whoever calls."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import constrainx as cx

X = jnp.asarray(np.random.default_rng(0).normal(size=(8, 3)), jnp.float32)


class Net(nnx.Module):
    """Everything that differs between training and evaluation."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.hidden = nnx.Linear(3, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, momentum=0.5, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.out = nnx.Linear(4, 2, rngs=rngs)

    def __call__(self, x):
        return self.out(self.dropout(jnp.tanh(self.norm(self.hidden(x)))))


class Even(cx.Constraint):
    def residual(self, model, batch, *, key):
        return model(batch["x"]) - model(-batch["x"])


def measure(model, constraint):
    """The violation in evaluation mode, with nothing of ours."""
    clone = nnx.clone(model)
    clone.eval()
    residual = np.asarray(clone(X) - clone(-X), np.float64)
    if constraint.reduce == "norm":
        rows = np.sqrt(np.mean(residual**2, axis=1))
        return np.sqrt(np.mean(rows**2))
    return np.sqrt(np.mean(residual**2))


def loss(model):
    return jnp.mean(model(X) ** 2)


def take_step(model, optimizer, key, **extra):
    """One step; the model as the constraint should have seen it."""
    gradients = nnx.grad(loss)(model)  # which moves the batch statistics, too
    seen = nnx.clone(model)
    optimizer.update(model, gradients, batch={"x": X}, key=key, **extra)
    return seen


def step_eagerly(model, optimizer, key):
    return take_step(model, optimizer, key)


@nnx.jit
def step_compiled(model, optimizer, key):
    return take_step(model, optimizer, key, module=model)


@pytest.mark.parametrize("reduce", ["norm", "none"])
@pytest.mark.parametrize("step", [step_eagerly, step_compiled], ids=["eager", "nnx.jit"])
def test_the_report_is_of_the_model_of_now_in_evaluation_mode(step, reduce):
    model, constraint = Net(), Even(reduce=reduce)
    tx = cx.constrain(optax.sgd(0.01), constraint, model=model)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    for index in range(3):
        seen = step(model, optimizer, jax.random.key(index))
        violation = cx.reports(optimizer.opt_state)["even"].violation
        np.testing.assert_allclose(violation, measure(seen, constraint), rtol=1e-5)


@pytest.mark.parametrize("wrap", [nnx.jit, jax.jit], ids=["nnx.jit", "jax.jit"])
def test_inside_of_a_compiled_function_a_stale_model_is_refused(wrap):
    model = Net()
    optimizer = cx.constrain(optax.sgd(0.01), Even(), model=model)
    params = nnx.as_pure(nnx.state(model, nnx.Param))
    with pytest.raises(ValueError, match=r"norm\.mean.*pass `module=model`"):
        wrap(lambda g, s, p: optimizer.update(g, s, p, batch={"x": X}))(
            params, optimizer.init(params), params
        )


def test_state_that_a_constraint_does_not_read_may_be_stale():
    """A constraint on weights alone needs nothing to remember, whatever else the model holds."""
    model = Net()
    unit = cx.UnitNorm(lambda m: m.hidden.kernel[...], gamma=1.0)
    tx = cx.constrain(optax.sgd(0.01), unit, model=model)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
        optimizer.update(model, nnx.grad(lambda m: jnp.mean(m(X) ** 2))(model))

    for _ in range(8):
        step(model, optimizer)
    np.testing.assert_allclose(jnp.linalg.norm(model.hidden.kernel[...]), 1, rtol=1e-4)


def test_frozen_weights_are_not_baked_into_the_program():
    """With the model passed, what is frozen is an argument of the program, not a constant in it."""
    model = nnx.Sequential(nnx.Linear(3, 64, rngs=nnx.Rngs(0)), nnx.Linear(64, 2, rngs=nnx.Rngs(1)))
    wrt = nnx.All(nnx.Param, nnx.PathContains(1))
    optimizer = cx.constrain(optax.sgd(0.01), Even(wrt=wrt), model=model)
    graph, params, rest = nnx.split(model, wrt, ...)

    def step(gradients, state, params, rest):
        module = nnx.merge(graph, params, rest)
        return optimizer.update(gradients, state, params, batch={"x": X}, module=module)

    text = jax.jit(step).lower(params, optimizer.init(params), params, rest).as_text()
    assert 'dense<"0x' not in text


def test_dropout_does_not_leak_into_a_constraint():
    class Same(cx.Constraint):
        def residual(self, model, batch, *, key):
            return model(batch["x"]) - model(batch["x"])

    model = Net()
    optimizer = cx.constrain(optax.sgd(0.01), Same(reduce="rms"), model=model)
    params = nnx.state(model, nnx.Param)
    _, state = optimizer.update(params, optimizer.init(params), params, batch={"x": X})
    assert float(cx.reports(state)["same"].violation) == 0.0


def test_random_streams_follow_from_the_key_also_if_stacked():
    class Stacked(nnx.Module):
        def __init__(self):
            @nnx.split_rngs(splits=3)
            @nnx.vmap(in_axes=(0,), out_axes=0)
            def make(rngs):
                return nnx.Dropout(0.5, rngs=rngs)

            self.kernel = nnx.Param(jnp.ones(3))
            self.noise = make(nnx.Rngs(0))

        def __call__(self, x):
            noise = jax.random.normal(self.noise.rngs.key[...][0], (3,))
            return x * self.kernel[...] + noise

    class Drawn(cx.Constraint):
        def residual(self, model, batch, *, key):
            return model(batch["x"])

    model = Stacked()
    composed = cx.compose(Drawn(), model=model)
    params = nnx.state(model, nnx.Param)
    first, again, other = (
        composed(params, {"x": X}, jax.random.key(seed))["drawn"] for seed in (0, 0, 1)
    )
    np.testing.assert_array_equal(first, again)
    assert not np.allclose(first, other)


def test_rows_of_single_examples_through_batch_statistics_are_refused():
    class Mixed(cx.Constraint):
        def residual(self, model, batch, *, key):
            model.train()
            return model(batch["x"])

    model = Net()
    with pytest.raises(ValueError, match=r"'mixed'.*mixes examples"):
        cx.compose(Mixed(reduce="norm"), model=model)(nnx.state(model, nnx.Param), {"x": X})


def test_a_residual_does_not_change_the_model():
    model = Net()
    before = jax.tree.map(jnp.copy, nnx.state(model))
    cx.compose(Even(), model=model)(nnx.state(model, nnx.Param), {"x": X})
    for new, old in zip(jax.tree.leaves(nnx.state(model)), jax.tree.leaves(before), strict=True):
        assert jnp.array_equal(new, old)
    assert not model.norm.use_running_average


def test_complex_parameters_are_refused_in_a_sentence():
    p = jnp.ones(3, complex)
    with pytest.raises(TypeError, match="real parameters"):
        cx.project(p, cx.compose(lambda p: jnp.real(p)), p)


def test_a_missing_entry_of_the_batch_names_the_constraint():
    model = Net()
    with pytest.raises(
        KeyError, match=r"'even' looked up 'x', and the batch has \['y'\]"
    ) as raised:
        cx.compose(Even(), model=model)(nnx.state(model, nnx.Param), {"y": X})
    assert raised.traceback[-1].name == "residual"


def test_rows_that_do_not_fit_in_memory_are_solved_iteratively(monkeypatch, caplog):
    """Norm rows through an embedding are stored: they count against the bound on memory."""
    from constrainx.step import _linearise

    class Embedded(nnx.Module):
        def __init__(self):
            self.table = nnx.Embed(4096, 1024, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return self.table(x)

    class Zero(cx.Constraint):
        def residual(self, model, batch, *, key):
            return model(batch["x"])

    model, batch = Embedded(), {"x": jnp.arange(32)}
    params = nnx.state(model, nnx.Param)
    monkeypatch.setattr(_linearise, "BYTES_OF_STORED_GRADIENTS", 2**28)
    composed = cx.compose(Zero(reduce="norm"), model=model)

    def trace():
        return cx.project(params, composed, params, batch=batch, model=model)

    with caplog.at_level("INFO", logger="constrainx"):
        jax.eval_shape(trace)
    assert "LSMR" in caplog.text
    assert "would take 0.5 GB" in caplog.text


class Tied(nnx.Module):
    """A layer in two places, a normalisation, noise that evaluation mode leaves on, and a trace."""

    def __init__(self):
        self.rngs = nnx.Rngs(0)
        self.first = nnx.Linear(3, 3, rngs=self.rngs)
        self.again = self.first
        self.norm = nnx.LayerNorm(3, rngs=self.rngs)
        self.offset = nnx.BatchStat(jnp.ones(()))
        self.scale = 1.0

    def __call__(self, x):
        self.sow(nnx.Intermediate, "seen", x)
        noise = jax.random.normal(self.rngs.noise(), (3,))
        return self.scale * self.again(self.norm(jnp.tanh(self.first(x)))) + self.offset + noise


@pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning")
@pytest.mark.parametrize("wrap", [lambda f: f, nnx.jit], ids=["eager", "nnx.jit"])
def test_a_module_is_whole_after_its_way_through_an_nnx_optimizer(wrap):
    """Which replaces variables by arrays, and makes two of a layer in two places."""

    class Zero(cx.Constraint):
        def residual(self, model, batch, *, key):
            return model(batch["x"])

    model, constraint, key = Tied(), Zero(gamma=0.5, reduce="norm"), jax.random.key(7)
    method = cx.NullSpace(placement="update")
    tx = cx.constrain(optax.sgd(0.01), constraint, model=model, method=method)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    model.scale = 2.0  # and settings are those of now

    @wrap
    def step(model, optimizer):
        optimizer.update(model, nnx.grad(loss)(model), batch={"x": X}, key=key, module=model)

    graph, before, rest = nnx.split(model, nnx.Param, ...)
    before = jax.tree.map(jnp.copy, before)

    def rows(params):
        current = nnx.merge(graph, params, rest, copy=True)
        return cx.compose(constraint, model=current)(params, {"x": X}, key)["zero"]

    step(model, optimizer)
    change = jax.tree.map(jnp.subtract, nnx.state(model, nnx.Param), before)
    c, moved = jax.jvp(rows, (before,), (change,))
    np.testing.assert_allclose(moved, -0.5 * c, atol=1e-5)
    violation = cx.reports(optimizer.opt_state)["zero"].violation
    np.testing.assert_allclose(violation, np.sqrt(np.mean(np.square(c))), rtol=1e-5)


def test_rows_of_single_examples_through_batch_statistics_are_refused_in_a_loop():
    class Mixed(cx.Constraint):
        def residual(self, model, batch, *, key):
            model.train()
            return model(batch["x"])

    model = Net()
    tx = cx.constrain(optax.sgd(0.01), Mixed(reduce="norm"), model=model)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    with pytest.raises(ValueError, match=r"'mixed'.*mixes examples"):
        take_step(model, optimizer, jax.random.key(0), module=model)


def test_outside_of_compiled_functions_a_stale_model_is_refused_too():
    """A copy is trained, and the batch statistics of the original stay behind."""
    model = Net()
    optimizer = nnx.Optimizer(
        copy := nnx.clone(model), cx.constrain(optax.sgd(0.01), Even(), model=model), wrt=nnx.Param
    )
    copy.hidden.kernel[...] *= 1.1
    with pytest.raises(ValueError, match=r"'even'.*norm\.mean.*pass `module=model`"):
        take_step(copy, optimizer, jax.random.key(0))
    seen = take_step(copy, optimizer, jax.random.key(0), module=copy)
    violation = cx.reports(optimizer.opt_state)["even"].violation
    np.testing.assert_allclose(violation, measure(seen, Even()), rtol=1e-5)


def test_a_module_from_outside_of_a_compiled_function_is_refused():
    model = Net()
    tx = cx.constrain(optax.sgd(0.01), Even(), model=model)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit
    def step(inner, optimizer):
        optimizer.update(inner, nnx.grad(loss)(inner), batch={"x": X}, module=model)

    with pytest.raises(ValueError, match="the model that these parameters were taken from"):
        step(model, optimizer)


def test_rows_outside_of_an_optimizer_are_not_of_a_stale_model_either():
    model = Net()
    composed, params = cx.compose(Even(), model=model), nnx.state(model, nnx.Param)
    with pytest.raises(ValueError, match=r"norm\.mean.*pass the model"):
        jax.jit(lambda p: composed(p, {"x": X}))(params)
    with pytest.raises(ValueError, match=r"norm\.mean.*pass `model=` to `project`"):
        jax.jit(lambda p: cx.project(p, composed, p, batch={"x": X}))(params)


def test_parameters_of_another_model_are_named():
    model = Net()
    params = {"weights": jnp.ones(3)}
    with pytest.raises(ValueError, match=r"have 'weights', which this Net does not have"):
        cx.compose(Even(), model=model)(params, {"x": X}, model=model)


@pytest.mark.parametrize("kind", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit])
def test_a_loop_on_a_mesh_of_the_user_has_the_same_numbers(kind):
    constraint, key = Even(reduce="norm"), jax.random.key(0)

    def run(x):
        model = Net()
        tx = cx.constrain(optax.sgd(0.1), constraint, model=model)
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

        @nnx.jit
        def step(model, optimizer, x):
            gradients = nnx.grad(lambda model: jnp.mean(model(x) ** 2))(model)
            optimizer.update(model, gradients, batch={"x": x}, key=key, module=model)

        model.dropout.deterministic = True
        step(model, optimizer, x)
        return np.asarray(model.hidden.kernel[...])

    mesh = jax.make_mesh((2,), ("data",), axis_types=(kind,), devices=jax.devices()[:2])
    with jax.set_mesh(mesh):
        found = run(jax.device_put(X, jax.NamedSharding(mesh, jax.P("data"))))
    np.testing.assert_allclose(found, run(X), atol=1e-6)
