"""Small problems to train on, and a training loop written by hand to compare with."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import constrainx as cx
from constrainx.runtime import by_path

EXAMPLES, BATCH = 40, 8
_generator = np.random.default_rng(0)
X = _generator.normal(size=(EXAMPLES, 3)).astype(np.float32)
Y = np.stack([np.sin(X[:, 0]), X[:, 1] * X[:, 2]], axis=1).astype(np.float32)


class Net(nnx.Module):
    def __init__(self, width=4):
        rngs = nnx.Rngs(0)
        self.hidden = nnx.Linear(3, width, rngs=rngs)
        self.out = nnx.Linear(width, 2, rngs=rngs)

    def __call__(self, x):
        return self.out(jnp.tanh(self.hidden(x)))


class Noisy(nnx.Module):
    """Has what is hard to resume: dropout with its own random streams, and batch statistics."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.hidden = nnx.Linear(3, 4, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.out = nnx.Linear(4, 2, rngs=rngs)

    def __call__(self, x):
        return self.out(self.dropout(jnp.tanh(self.norm(self.hidden(x)))))


class Counter(nnx.Module):
    """One number, which `countdown` with `optax.sgd(1.0)` lowers by one in each step."""

    def __init__(self):
        self.value = nnx.Param(jnp.zeros(()))


def countdown(model, batch):
    """The gradient is one for any batch that is finite."""
    return model.value[...] * jnp.mean(batch["x"])


def ones(batch=2):
    return cx.data.arrays({"x": np.ones(6, np.float32)}, batch=batch)


def arrays(batch=BATCH, **options):
    return cx.data.arrays({"x": X, "y": Y}, batch=batch, **options)


def squared(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def unit_hidden(**options):
    return cx.UnitNorm(of=lambda m: m.hidden.kernel[...], **{"gamma": 0.5, **options})


# Settings that tests give by themselves, and the group that a trainer takes each in.
GROUPS = {
    "metrics": ("evaluation", "metrics"),
    "evaluate_every": ("evaluation", "every"),
    "monitor": ("evaluation", "monitor"),
    "config": ("run", "config"),
    "save_every": ("run", "save_every"),
    "keep": ("run", "keep"),
    "on_save_error": ("run", "on_save_error"),
    "fsdp": ("devices", "fsdp"),
    "log_every": ("logging", "every"),
    "callbacks": ("logging", "callbacks"),
    "progress": ("logging", "progress"),
    "learning_rate": ("logging", "learning_rate"),
}


def trainer(**options):
    options = {
        "model": Net(),
        "loss": squared,
        "optimizer": optax.adam(0.05),
        "data": arrays(),
        "steps": 6,
        "devices": 1,
        "progress": False,
        **options,
    }
    groups = {"evaluation": {}, "run": {}, "devices": {}, "logging": {}}
    for name, (group, field) in GROUPS.items():
        if name in options:
            groups[group][field] = options.pop(name)
    options["logging"] = cx.Logging(**groups["logging"])
    options["devices"] = cx.Devices(options.pop("devices"), **groups["devices"])
    if options.get("evaluation") is not None:
        options["evaluation"] = cx.Evaluation(options["evaluation"], **groups["evaluation"])
    if options.get("run") is not None:
        options["run"] = cx.RunFolder(options["run"], **groups["run"])
    return cx.Trainer(**options)


def counter(**options):
    options = {
        "model": Counter(),
        "loss": countdown,
        "optimizer": optax.sgd(1.0),
        "data": ones(),
        **options,
    }
    return trainer(**options)


class Recorder(cx.Callback):
    """Records every call."""

    def __init__(self):
        self.started, self.logged, self.evaluated = [], {}, {}
        self.saved, self.events, self.ended = [], [], []

    def on_start(self, trainer, step):
        self.started.append(step)

    def on_log(self, step, metrics):
        self.logged[step] = dict(metrics)

    def on_evaluate(self, step, metrics):
        self.evaluated[step] = dict(metrics)

    def on_save(self, step):
        self.saved.append(step)

    def on_event(self, step, message):
        self.events.append((step, message))

    def on_end(self, step, reason):
        self.ended.append((step, reason))


def by_hand(model, optimizer, data, steps, *, unit_norm=None, placement="twice", dtype=jnp.float32):
    """Flat parameters and losses of each step, by Optax and a dense pseudoinverse alone.

    Args:
        unit_norm: γ, for steps that obey ‖hidden kernel‖² = 1; None for no constraint.
        placement: whether to project updates alone, or gradients as well.
        dtype: in which to compute the loss.
    """
    graph, parameters, rest = nnx.split(model, nnx.Param, ...)
    parameters = nnx.as_pure(parameters)
    flat, unflatten = jax.flatten_util.ravel_pytree(parameters)

    def loss(parameters, batch):
        low = jax.tree.map(lambda leaf: leaf.astype(dtype), (parameters, batch))
        return squared(nnx.merge(graph, low[0], rest), low[1]).astype(jnp.float32)

    def residual(flat):
        return jnp.sum(unflatten(flat)["hidden"]["kernel"] ** 2) - 1

    @jax.jit
    def step(parameters, state, batch):
        value, gradients = jax.value_and_grad(loss)(parameters, batch)
        if unit_norm is not None and placement == "twice":
            J = jax.grad(residual)(jax.flatten_util.ravel_pytree(parameters)[0])[None]
            gradient, _ = jax.flatten_util.ravel_pytree(gradients)
            gradients = unflatten(gradient - jnp.linalg.pinv(J) @ (J @ gradient))
        updates, state = optimizer.update(gradients, state, parameters)
        if unit_norm is not None:
            flat, _ = jax.flatten_util.ravel_pytree(parameters)
            update, _ = jax.flatten_util.ravel_pytree(updates)
            J = jax.grad(residual)(flat)[None]
            update -= jnp.linalg.pinv(J) @ (J @ update + unit_norm * residual(flat))
            updates = unflatten(update)
        return optax.apply_updates(parameters, updates), state, value

    state = optimizer.init(parameters)
    path, losses = [np.asarray(flat)], []
    for batch in itertools.islice(data.from_step(0), steps):
        parameters, state, value = step(parameters, state, batch)
        path.append(np.asarray(jax.flatten_util.ravel_pytree(parameters)[0]))
        losses.append(float(value))
    return np.array(path), np.array(losses)


def flat(parameters):
    return np.asarray(jax.flatten_util.ravel_pytree(nnx.as_pure(parameters))[0])


def assert_same_state(found, wanted):
    """Compares every array bit for bit."""
    found, wanted = by_path(found), by_path(wanted)
    assert found.keys() == wanted.keys()
    different = [
        path
        for path in wanted
        if not np.array_equal(found[path], wanted[path], equal_nan=True)
        or found[path].dtype != wanted[path].dtype
    ]
    assert not different
