"""What a trainer does, against a loop written by hand."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType

import constrainx as cx

from .problems import (
    BATCH,
    Counter,
    Net,
    Recorder,
    X,
    Y,
    arrays,
    assert_same_state,
    by_hand,
    countdown,
    counter,
    flat,
    ones,
    squared,
    trainer,
    unit_hidden,
)


def absolute(model, batch):
    return jnp.abs(model(batch["x"]) - batch["y"])


def with_metrics(model, batch):
    return squared(model, batch), {"absolute": jnp.mean(absolute(model, batch))}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """One run with a folder, metrics, evaluation and callbacks, shared by several tests."""
    recorder = Recorder()
    run = tmp_path_factory.mktemp("runs") / "plain"
    trained = trainer(
        loss=with_metrics,
        steps=7,
        log_every=3,
        evaluation=arrays(),
        metrics={"absolute": absolute},
        evaluate_every=4,
        save_every=5,
        callbacks=[recorder],
        run=run,
        config={"width": 4},
    )
    return trained, trained.fit(), recorder, run


def test_fit_matches_a_loop_written_by_hand(plain):
    trained, result, _, _ = plain
    path, _ = by_hand(Net(), optax.adam(0.05), arrays(), 7)
    np.testing.assert_allclose(flat(trained.state.parameters), path[-1], rtol=1e-6, atol=1e-7)
    assert (result.reason, result.step) == ("finished", 7)
    # The user's own model holds the outcome, too.
    np.testing.assert_array_equal(
        flat(nnx.state(trained.model, nnx.Param)), flat(nnx.state(result.model))
    )


def test_logs_are_means_since_the_last_log(plain):
    _, _, recorder, _ = plain
    path, losses = by_hand(Net(), optax.adam(0.05), arrays(), 7)
    assert list(recorder.logged) == [3, 6, 7]
    means = [losses[0:3].mean(), losses[3:6].mean(), losses[6]]
    np.testing.assert_allclose([m["loss"] for m in recorder.logged.values()], means, rtol=1e-5)
    model, values = Net(), []
    graph, parameters = nnx.split(model)
    _, unflatten = jax.flatten_util.ravel_pytree(nnx.as_pure(parameters))
    batches = arrays().from_step(0)
    for point in path[:3]:
        batch = next(batches)
        values.append(np.mean(absolute(nnx.merge(graph, unflatten(point)), batch)))
    assert recorder.logged[3]["absolute"] == pytest.approx(np.mean(values), rel=1e-5)
    assert recorder.logged[3]["update_norm"] > 0


def test_the_violation_of_a_constraint_is_the_mean_of_the_steps_that_evaluate_it():
    """Those at which it acts, here 1, 3 and 5, and the last before a log, here 2 and 5."""
    every_step, seldom = Recorder(), Recorder()
    for recorder, log_every in ((every_step, 1), (seldom, 3)):
        trainer(
            constraints=[unit_hidden(start=1, every=2)],
            steps=7,
            log_every=log_every,
            callbacks=[recorder],
        ).fit()
    name = "constraints/unit-norm/violation"
    values = [figures[name] for figures in every_step.logged.values()]
    assert len(set(values)) == 7
    assert seldom.logged[3][name] == pytest.approx((values[1] + values[2]) / 2, rel=1e-6)
    assert seldom.logged[6][name] == pytest.approx((values[3] + values[5]) / 2, rel=1e-6)
    assert name not in seldom.logged[7]


def test_callbacks_are_called_at_the_right_steps(plain):
    _, result, recorder, _ = plain
    assert recorder.started == [0]
    assert list(recorder.evaluated) == [4, 7]
    assert recorder.evaluated[7] == result.metrics
    assert recorder.saved == [5, 7]
    assert recorder.ended == [(7, "finished")]
    assert recorder.events == []


def test_the_folder_holds_config_environment_and_metrics(plain):
    _, _, recorder, run = plain
    assert json.loads((run / "config.json").read_text()) == {"width": 4}
    assert json.loads((run / "environment.json").read_text())["jax"] == jax.__version__
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["kind"]) for line in lines] == [
        (3, "train"), (4, "eval"), (6, "train"), (7, "train"), (7, "eval"), (7, "event")
    ]  # fmt: skip
    assert lines[0]["loss"] == recorder.logged[3]["loss"]
    assert list((run / "tensorboard").iterdir())


@pytest.mark.parametrize("size", [40, 37, 17, 5, 1])
def test_evaluation_counts_every_example_once(plain, size):
    trained, result, _, _ = plain
    wanted = np.mean(np.abs(np.asarray(result.model(X[:size])) - Y[:size]))
    held_out = cx.data.arrays({"x": X[:size], "y": Y[:size]}, batch=BATCH)
    assert trained.evaluate(held_out)["absolute"] == pytest.approx(wanted, rel=1e-5)


def test_evaluation_errors_say_what_is_missing(plain):
    with pytest.raises(ValueError, match=r"`evaluate` needs data"):
        counter().evaluate()
    wrong = counter(evaluation=ones(), metrics={"mean": lambda model, batch: jnp.mean(batch["x"])})
    with pytest.raises(ValueError, match=r"metric 'mean' must return a figure for each of the 2"):
        wrong.evaluate()


def test_accumulated_gradients_match_those_of_the_whole_batch():
    trained = trainer(accumulate=4, constraints=[unit_hidden()])
    trained.fit()
    path, _ = by_hand(Net(), optax.adam(0.05), arrays(), 6, unit_norm=0.5)
    np.testing.assert_allclose(flat(trained.state.parameters), path[-1], rtol=2e-5, atol=2e-6)


def test_bfloat16_applies_to_the_loss_alone():
    seen = {}

    def loss(model, batch):
        output = model(batch["x"])
        seen["loss"] = (output.dtype, batch["y"].dtype)
        return jnp.mean((output - batch["y"]) ** 2)

    class Watching(cx.Constraint):
        def residual(self, model, batch, *, key):
            seen["constraint"] = (model.hidden.kernel.dtype, batch["x"].dtype)
            return jnp.sum(model.hidden.kernel[...] ** 2) - 1

    recorder = Recorder()
    trained = trainer(
        loss=loss,
        precision="bfloat16",
        constraints=[Watching(gamma=0.5)],
        callbacks=[recorder],
        log_every=1,
        steps=4,
    )
    trained.fit()
    assert seen == {"loss": (jnp.bfloat16,) * 2, "constraint": (jnp.float32,) * 2}
    state = trained.state
    floats = [
        leaf.dtype
        for leaf in jax.tree.leaves((state.parameters, state.optimizer))
        if jnp.issubdtype(leaf.dtype, jnp.floating)
    ]
    assert set(floats) == {jnp.dtype(jnp.float32)}
    losses = [metrics["loss"] for metrics in recorder.logged.values()]
    options = {"unit_norm": 0.5, "dtype": jnp.bfloat16}
    _, low = by_hand(Net(), optax.adam(0.05), arrays(), 4, **options)
    _, high = by_hand(Net(), optax.adam(0.05), arrays(), 1)
    # Eight bits of mantissa: a loss in float32 is told apart, the order of additions is not.
    np.testing.assert_allclose(losses, low, rtol=2**-7)
    assert losses[0] != pytest.approx(high[0], rel=1e-5)
    assert losses[0] == float(jnp.bfloat16(losses[0]))


def test_the_moving_average_matches_its_formula_and_is_evaluated():
    values = {"value": lambda model, batch: jnp.full(len(batch["x"]), model.value[...])}
    trained = counter(steps=5, ema=0.75, evaluation=ones(), metrics=values)
    result = trained.fit()
    path = -np.arange(6.0)
    # ema_t = d^t p_0 + (1 − d) Σ_i d^(t − i) p_i
    wanted = 0.75**5 * path[0] + 0.25 * sum(0.75 ** (5 - i) * path[i] for i in range(1, 6))
    assert result.metrics["value"] == pytest.approx(wanted)
    assert float(result.model.value[...]) == pytest.approx(wanted)
    assert float(trained.state.parameters["value"]) == -5


def distance(model, batch):
    return jnp.full(len(batch["x"]), (model.value[...] + 3) ** 2)


def test_patience_ends_the_run_and_the_best_checkpoint_is_kept(tmp_path):
    recorder = Recorder()
    options = {
        "steps": 20,
        "evaluation": ones(),
        "metrics": {"distance": distance},
        "monitor": cx.Monitor(metric="distance", patience=2),
        "evaluate_every": 2,
        "save_every": 1,
        "keep": cx.Keep(last=1, best=2),
        "run": tmp_path / "run",
    }
    result = counter(**options, callbacks=[recorder]).fit()
    # (step − 3)² at 2, 4, 6: one that equals the best is not better.
    assert [m["distance"] for m in recorder.evaluated.values()] == [1, 1, 9]
    assert (result.reason, result.step) == ("stopped early", 6)
    again = counter(**options)
    assert again.restore("best") == 2
    assert float(again.state.parameters["value"]) == -2
    saved = sorted(int(path.name) for path in (tmp_path / "run" / "checkpoints").iterdir())
    # Not 3, which has not been evaluated.
    assert saved == [2, 4, 6]


def test_a_monitor_can_look_for_the_largest_metric(tmp_path):
    options = {
        "evaluation": ones(),
        "metrics": {"distance": distance},
        "monitor": cx.Monitor(metric="distance", mode="max"),
        "evaluate_every": 1,
        "run": tmp_path / "run",
    }
    counter(**options, steps=5).fit()
    # 4, 1, 0, 1, 4: the first of the two.
    assert counter(**options).restore("best") == 1
    monitor = cx.Monitor(metric="m", min_change=0.5)
    assert monitor.is_better(1.0, None)
    assert not monitor.is_better(float("nan"), None)
    assert not monitor.is_better(0.6, 1.0)
    assert monitor.is_better(0.4, 1.0)


def test_a_fast_dev_run_takes_two_steps_and_writes_nothing(tmp_path):
    recorder = Recorder()
    held_out = cx.data.arrays({"x": np.arange(6, dtype=np.float32)}, batch=2)
    trained = counter(
        run=tmp_path / "run",
        save_every=1,
        evaluation=held_out,
        metrics={"x": lambda model, batch: batch["x"]},
        callbacks=[recorder],
    )
    result = trained.fit(fast_dev_run=True)
    assert (result.step, float(trained.state.parameters["value"])) == (2, -2)
    assert result.metrics == {"x": 0.5}
    assert recorder.saved == []
    assert list(tmp_path.iterdir()) == []


def test_validate_traces_without_running():
    calls = []

    def loss(model, batch):
        jax.debug.callback(lambda: calls.append(1))
        return squared(model, batch)

    good = trainer(loss=loss)
    shapes = good.validate()
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(shapes))
    assert jax.tree.map(jnp.shape, good.state) == jax.tree.map(lambda s: s.shape, shapes)
    wide = cx.data.arrays({"x": np.zeros((8, 5), np.float32), "y": Y[:8]}, batch=8)
    with pytest.raises(TypeError, match=r"\(8, 5\).*\(3, 4\)|contracting"):
        trainer(loss=loss, data=wide).validate()
    with pytest.raises(ValueError, match=r"`loss` must return one number, got .*\(8, 2\)"):
        trainer(loss=absolute).validate()
    with pytest.raises(ValueError, match=r"metric 'all' that `loss` returns must be one number"):
        trainer(loss=lambda m, b: (squared(m, b), {"all": absolute(m, b)})).validate()
    jax.effects_barrier()
    assert calls == []
    assert good.step == 0


@pytest.mark.parametrize(
    ("method", "gamma"),
    [
        ("penalty", 0.5),
        (cx.Lagrangian(), 0.5),
        ("nullspace", 0.5),
        (cx.NullSpace(placement="twice"), 0.5),
        # In front of the optimizer, γ is multiplied by the learning rate.
        (cx.NullSpace(placement="gradient"), 5.0),
    ],
    ids=str,
)
def test_every_method_logs_violations(method, gamma):
    recorder = Recorder()
    trained = trainer(
        constraints=[unit_hidden(name="unit", gamma=gamma)],
        method=method,
        optimizer=optax.sgd(0.1),
        log_every=1,
        steps=8,
        callbacks=[recorder],
    )
    trained.fit()
    logged = [metrics["constraints/unit/violation"] for metrics in recorder.logged.values()]
    # What is logged for a step is the violation before it.
    at_first = abs(np.sum(np.asarray(Net().hidden.kernel[...]) ** 2) - 1)
    assert logged[0] == pytest.approx(at_first, rel=1e-5)
    assert logged[-1] < 0.5 * logged[0]
    if method == "nullspace" or isinstance(method, cx.NullSpace):
        path, _ = by_hand(Net(), optax.sgd(0.1), arrays(), 8, unit_norm=0.5)
        np.testing.assert_allclose(flat(trained.state.parameters), path[-1], rtol=1e-5, atol=1e-6)


def test_without_a_method_constraints_cost_nothing_and_are_measured_in_evaluation():
    recorder = Recorder()
    trained = trainer(
        constraints=[unit_hidden(name="unit")],
        method="none",
        optimizer=optax.sgd(0.1),
        log_every=1,
        steps=8,
        callbacks=[recorder],
        evaluation=arrays(),
    )
    trained.fit()
    path, _ = by_hand(Net(), optax.sgd(0.1), arrays(), 8)
    np.testing.assert_allclose(flat(trained.state.parameters), path[-1], rtol=1e-5, atol=1e-6)
    assert not any("constraints/" in name for m in recorder.logged.values() for name in m)
    assert trained.evaluate()["violation/unit"] > 0.1


def test_constraints_that_contradict_are_named_once():
    recorder = Recorder()

    def length(value):
        return lambda m: m.value[...] / value

    trained = counter(
        model=Raised(),
        constraints=[
            cx.UnitNorm(of=length(1.0), name="one", gamma=0.5),
            cx.UnitNorm(of=length(2.0), name="two", gamma=0.5),
        ],
        log_every=1,
        callbacks=[recorder],
    )
    trained.fit()
    (event,) = recorder.events
    assert event[0] == 1
    assert "'one', 'two' contradict" in event[1]


class Raised(Counter):
    def __init__(self):
        self.value = nnx.Param(jnp.ones(()) * 3)


def test_augmentation_and_keys_differ_from_step_to_step():
    recorder = Recorder()

    def augment(batch, key):
        return {"x": batch["x"] + jax.random.normal(key)}

    def loss(model, batch, key):
        metrics = {"batch": batch["x"][0], "draw": jax.random.normal(key)}
        return countdown(model, batch), metrics

    options = {"loss": loss, "augment": augment, "log_every": 1, "steps": 3}
    counter(**options, callbacks=[recorder]).fit()
    drawn = [(m["batch"], m["draw"]) for m in recorder.logged.values()]
    assert len({value for pair in drawn for value in pair}) == 6


def test_only_variables_selected_by_wrt_are_trained():
    trained = trainer(wrt=nnx.All(nnx.Param, nnx.PathContains("out")), steps=2)
    result = trained.fit()
    before = Net()
    np.testing.assert_array_equal(result.model.hidden.kernel[...], before.hidden.kernel[...])
    assert not np.array_equal(result.model.out.kernel[...], before.out.kernel[...])


def test_fitting_a_finished_trainer_takes_no_steps():
    trained = counter(steps=3)
    trained.fit()
    for steps in (3, 2):
        trained.steps = steps
        result = trained.fit()
        assert (result.reason, result.step) == ("finished", 3)
    assert float(trained.state.parameters["value"]) == -3


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"steps": 0}, ValueError, r"`Trainer\(steps=...\)` must be at least 1, got 0"),
        ({"log_every": 0}, ValueError, r"`Logging\(every=...\)` must be at least 1, got 0"),
        ({"method": "nulspace"}, ValueError, r"method='nulspace'.*Did you mean 'nullspace'"),
        ({"precision": "float16"}, ValueError, r"precision='float16'.*'float32', 'bfloat16'"),
        ({"on_nonfinite": "halt"}, ValueError, r"on_nonfinite='halt'.*'stop', 'skip'"),
        (
            {"run": "somewhere", "on_save_error": "go on"},
            ValueError,
            r"on_save_error='go on'.*'continue'",
        ),
        ({"ema": 1.0}, ValueError, r"`Trainer\(ema=...\)` must be in \[0, 1\), got 1.0"),
        ({"data": {"x": X}}, TypeError, r"`Trainer\(data=...\)`.*cx.data.arrays.*got dict"),
        ({"model": squared}, TypeError, r"`Trainer\(model=...\)` must be an nnx.Module.*function"),
        ({"devices": 9}, ValueError, r"`devices=9` must be between 1 and 8"),
        (
            {"devices": 3},
            ValueError,
            r"`batch=2` must be a multiple of the 3 devices.* 3, or fewer",
        ),
        ({"accumulate": 4}, ValueError, r"`accumulate=4` parts of a batch of 2"),
        (
            {
                "monitor": cx.Monitor(metric="distanc"),
                "evaluation": ones(),
                "metrics": {"distance": distance},
            },
            ValueError,
            r"metric='distanc'.*is not measured.*\['distance'\].*Did you mean 'distance'",
        ),
    ],
)
def test_a_wrong_argument_is_named_before_anything_runs(options, error, message):
    with pytest.raises(error, match=message):
        counter(**options)


def test_a_violation_can_be_monitored_by_its_unique_name():
    same = [cx.UnitNorm(of=lambda m: m.value[...])] * 2
    monitor = cx.Monitor(metric="violation/unit-norm-2")
    counter(constraints=same, monitor=monitor, evaluation=ones())
    with pytest.raises(ValueError, match=r"unit-norm-3.*is not measured"):
        counter(
            constraints=same,
            monitor=cx.Monitor(metric="violation/unit-norm-3"),
            evaluation=ones(),
        )


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_a_trainer_inside_of_the_callers_mesh_uses_its_own(kind):
    alone = trainer(constraints=[unit_hidden()], devices=2)
    alone.fit()
    mesh = jax.make_mesh((4,), ("mine",), axis_types=(kind,))
    with jax.set_mesh(mesh):
        inside = trainer(constraints=[unit_hidden()], devices=2, evaluation=arrays())
        inside.fit()
    assert_same_state(inside.state, alone.state)


def test_a_random_key_in_a_plain_variable_is_refused_in_a_sentence():
    model = Net()
    model.noise = nnx.Variable(jax.random.key(0))
    with pytest.raises(TypeError, match=r"random key in .*noise.*nnx.Rngs"):
        trainer(model=model)


def test_a_model_may_have_constraints_of_its_own():
    model = Net()
    model.constraints = "none of ours"
    assert trainer(model=model, constraints=[unit_hidden()]).constraint_names == ("unit-norm",)


def halve(count):
    return 0.5**count


@pytest.mark.parametrize(
    ("options", "rates"),
    [
        ({"optimizer": optax.inject_hyperparams(optax.sgd)(halve)}, [1.0, 0.5, 0.25]),
        ({"optimizer": optax.inject_hyperparams(optax.sgd)(0.1)}, [0.1, 0.1, 0.1]),
        ({"optimizer": optax.sgd(halve), "learning_rate": halve}, [1.0, 0.5, 0.25]),
        ({"optimizer": optax.sgd(0.1), "learning_rate": 0.1}, [0.1, 0.1, 0.1]),
        ({"optimizer": optax.sgd(0.1)}, [None, None, None]),
    ],
)
def test_gradient_norm_and_learning_rate_are_logged(options, rates):
    recorder = Recorder()
    trained = counter(steps=3, log_every=1, callbacks=[recorder], **options)
    trained.fit()
    logged = recorder.logged.values()
    assert [figures["gradient_norm"] for figures in logged] == [1.0, 1.0, 1.0]
    assert [figures.get("learning_rate") for figures in logged] == pytest.approx(rates)
    # The update of a gradient of one is the learning rate.
    if None not in rates:
        assert [figures["update_norm"] for figures in logged] == pytest.approx(rates)


def test_the_learning_rate_of_a_schedule_waits_for_steps_that_were_skipped():
    x = np.ones(8, np.float32)
    x[2] = np.nan
    recorder = Recorder()
    trained = counter(
        data=cx.data.arrays({"x": x}, batch=2, shuffle=False),
        optimizer=optax.sgd(halve),
        learning_rate=halve,
        on_nonfinite="skip",
        steps=4,
        log_every=1,
        callbacks=[recorder],
    )
    trained.fit()
    taken = [figures for step, figures in recorder.logged.items() if step != 2]
    assert [figures["learning_rate"] for figures in taken] == [1.0, 0.5, 0.25]
    assert [figures["update_norm"] for figures in taken] == [1.0, 0.5, 0.25]
