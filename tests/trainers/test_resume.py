"""A run that was interrupted and resumed ends with the same bits as one that was not."""

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import tensorflow_datasets
from flax import nnx
from tensorflow_datasets.core import registered

import constrainx as cx
from constrainx.runtime import RunError
from constrainx.runtime._checkpoint import by_path
from constrainx.trainers._optimizer import describe_optimizer

from .problems import (
    Net,
    Noisy,
    Recorder,
    X,
    arrays,
    assert_same_state,
    counter,
    ones,
    squared,
    trainer,
    unit_hidden,
)


def train_with_and_without_a_break(make, folder, *, half=3):
    """Trains for twice ``half`` steps: at once, and with a new trainer after half of them."""
    whole = make(steps=2 * half, run=folder / "whole")
    whole.fit()
    make(steps=half, run=folder / "parts").fit()
    second = make(steps=2 * half, run=folder / "parts")
    before = jax.tree.map(np.asarray, second.state)
    assert second.restore() == half
    assert not np.array_equal(
        jax.tree.leaves(second.state.parameters)[0], jax.tree.leaves(before.parameters)[0]
    )
    second.fit()
    return whole, second


def make_noisy_trainer(**options):
    return trainer(model=Noisy(), constraints=[unit_hidden()], **options)


def test_dropout_batch_statistics_and_constraints_resume_bit_for_bit(tmp_path):
    whole, parts = train_with_and_without_a_break(make_noisy_trainer, tmp_path)
    assert_same_state(parts.state, whole.state)
    # That there was something to lose:
    rest = by_path(whole.state.rest)
    assert not np.array_equal(rest["norm.mean"], np.zeros(4))


def test_dropout_changes_with_every_step_and_with_the_seed():
    def loss(model, batch):
        kept = model.dropout(jnp.ones(64))
        return squared(model, batch), {"kept": jnp.sum(kept * jnp.arange(64.0))}

    def draws(seed):
        recorder = Recorder()
        options = {"loss": loss, "log_every": 1, "steps": 3, "seed": seed}
        trainer(model=Noisy(), callbacks=[recorder], **options).fit()
        return [metrics["kept"] for metrics in recorder.logged.values()]

    assert len({*draws(0), *draws(1)}) == 6


def make_masked_trainer(**options):
    def loss(model, batch, key):
        return squared(cx.masks.sample(model, key), batch)

    model = cx.masks.add_masks(Net())
    return trainer(
        model=cx.attach(model, cx.MaskBudget(0.5, gamma=0.3)),
        loss=loss,
        optimizer=optax.sgd(0.05),
        **options,
    )


def test_learnable_masks_resume_bit_for_bit(tmp_path):
    whole, parts = train_with_and_without_a_break(make_masked_trainer, tmp_path)
    assert_same_state(parts.state, whole.state)
    density = float(cx.masks.expected_density(whole.trained))
    # Six steps that each take away 0.3 of what 0.9 is too much.
    assert density == pytest.approx(0.5 + 0.4 * 0.7**6, abs=1e-3)


def test_multipliers_resume_bit_for_bit(tmp_path):
    def make(**options):
        return trainer(constraints=[unit_hidden()], method="lagrangian", **options)

    whole, parts = train_with_and_without_a_break(make, tmp_path)
    assert_same_state(parts.state, whole.state)
    assert float(jnp.abs(whole.state.constraints.multipliers["unit-norm"]).sum()) > 0


def test_accumulation_average_and_low_precision_resume_bit_for_bit(tmp_path):
    def make(**options):
        return trainer(accumulate=2, ema=0.9, precision="bfloat16", **options)

    whole, parts = train_with_and_without_a_break(make, tmp_path)
    assert_same_state(parts.state, whole.state)


with registered.skip_registration():

    class Points(tensorflow_datasets.core.GeneratorBasedBuilder):
        name = "points"
        VERSION = tensorflow_datasets.core.Version("1.0.0")
        # As in test_tfds.py: there are no checksums beside this file.
        code_path = None

        def _info(self):
            features = {
                "x": tensorflow_datasets.features.Tensor(shape=(3,), dtype=np.float32),
                "y": tensorflow_datasets.features.Tensor(shape=(2,), dtype=np.float32),
            }
            return tensorflow_datasets.core.DatasetInfo(
                builder=self, features=tensorflow_datasets.features.FeaturesDict(features)
            )

        def _split_generators(self, dl_manager):
            return {"train": self._generate_examples()}

        def _generate_examples(self):
            for i, x in enumerate(X[:20]):
                yield i, {"x": x, "y": x[:2]}


class Jitter(grain.transforms.RandomMap):
    def random_map(self, element, rng):
        return {**element, "x": element["x"] + rng.normal(size=3).astype(np.float32)}


def test_data_from_workers_resumes_bit_for_bit(tmp_path):
    """The number of workers may change, because batches are a function of the step."""
    Points(data_dir=tmp_path, file_format="array_record").download_and_prepare()

    def make(workers):
        options = {"data_dir": tmp_path, "transforms": (Jitter(),), "workers": workers}
        return lambda **others: trainer(
            data=cx.data.tfds("points", "train", batch=8, **options), **others
        )

    make(2)(steps=3, run=tmp_path / "run").fit()
    second = make(1)(steps=6, run=tmp_path / "run")
    assert second.restore() == 3
    second.fit()
    alone = make(0)(steps=6)
    alone.fit()
    assert_same_state(second.state, alone.state)


def test_the_best_metric_and_patience_survive_a_restart(tmp_path):
    def distance(model, batch):
        return jnp.full(len(batch["x"]), (model.value[...] + 2) ** 2)

    def make(**options):
        return counter(
            evaluation=ones(),
            metrics={"distance": distance},
            monitor=cx.Monitor(metric="distance", patience=4),
            evaluate_every=1,
            save_every=1,
            keep=cx.Keep(last=1, best=1),
            run=tmp_path / "run",
            **options,
        )

    make(steps=4).fit()
    second = make(steps=20)
    second.restore()
    result = second.fit()
    # The best is at step 2: two of four evaluations without a new one were before the restart.
    assert (result.reason, result.step) == ("stopped early", 6)
    third = make(steps=20)
    assert third.restore("best") == 2
    assert third.restore("last") == 6


def test_restoring_an_earlier_step_sets_later_checkpoints_aside(tmp_path):
    options = {"save_every": 1, "keep": cx.Keep(last=9), "run": tmp_path / "run"}
    counter(steps=5, **options).fit()
    recorder = Recorder()
    second = counter(steps=4, callbacks=[recorder], **options)
    assert second.restore(2) == 2
    second.fit()
    assert recorder.events[0] == (
        2,
        "resumed from step 2; set aside the later checkpoints [3, 4, 5]",
    )
    assert recorder.saved == [3, 4]
    assert counter(**options).restore() == 4
    aside = tmp_path / "run/checkpoints/set-aside"
    assert sorted(path.name for path in aside.iterdir()) == ["3", "4", "5"]
    third = counter(steps=4, **options)
    third.restore(3)
    third.fit()
    assert sorted(path.name for path in aside.iterdir()) == ["3", "4", "4-2", "5"]


def test_a_constraint_and_an_average_can_be_added_later(tmp_path):
    first = trainer(steps=3, run=tmp_path / "run")
    first.fit()
    recorder = Recorder()
    second = trainer(
        steps=6,
        run=tmp_path / "run",
        constraints=[unit_hidden(), unit_hidden(name="late", start=5)],
        ema=0.5,
        log_every=1,
        callbacks=[recorder],
    )
    assert second.restore() == 3
    for part in ("parameters", "optimizer"):
        assert_same_state(getattr(second.state, part), getattr(first.state, part))
    # An average starts from the parameters that were loaded, not from those of a new model.
    assert_same_state(second.state.ema, first.state.parameters)
    second.fit()
    violations = [m["constraints/unit-norm/violation"] for m in recorder.logged.values()]
    assert list(recorder.logged) == [4, 5, 6]
    assert violations[0] > 1.5 * violations[1] > 2 * violations[2]
    # Steps are those of the run, also for a constraint that came later.
    assert int(second.state.constraints.step) == 6
    assert bool(second.state.constraints.reports["late"].active)


def test_a_checkpoint_without_the_share_removed_still_restores(tmp_path, monkeypatch):
    def make(**options):
        return trainer(constraints=[unit_hidden()], run=tmp_path / "run", **options)

    def by_path_as_it_was(state):
        return {name: leaf for name, leaf in by_path(state).items() if not name.endswith("removed")}

    with monkeypatch.context() as patch:
        patch.setattr("constrainx.runtime._checkpoint.by_path", by_path_as_it_was)
        first = make(steps=3)
        first.fit()
    assert 0 < float(first.state.constraints.removed) < 1
    second = make(steps=6)
    assert second.restore() == 3
    assert float(second.state.constraints.removed) == 0
    restored = second.state.constraints._replace(removed=first.state.constraints.removed)
    assert_same_state(second.state._replace(constraints=restored), first.state)
    second.fit()
    assert 0 < float(second.state.constraints.removed) < 1


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    trainer(steps=1, run=tmp_path / "run").fit()
    wider = trainer(model=Net(width=5), run=tmp_path / "run")
    before = jax.tree.map(np.asarray, wider.state)
    with pytest.raises(cx.CheckpointError) as error:
        wider.restore()
    assert "parameters.hidden.kernel is (3, 4) there and (3, 5) here" in str(error.value)
    assert "step 1" in str(error.value)
    assert_same_state(wider.state, before)
    other = trainer(optimizer=optax.sgd(0.1, momentum=0.9), run=tmp_path / "run")
    with pytest.raises(cx.CheckpointError, match=r"optimizer\.0\.trace\S* is missing there"):
        other.restore()


def test_restoring_a_missing_checkpoint_is_an_error(tmp_path):
    with pytest.raises(cx.CheckpointError, match="nothing to restore"):
        counter(run=tmp_path / "run").restore()
    with pytest.raises(cx.CheckpointError, match="nothing to restore"):
        counter().restore()
    counter(steps=2, run=tmp_path / "run").fit()
    with pytest.raises(cx.CheckpointError, match=r"no checkpoint of step 7; it has \[2\]"):
        counter(run=tmp_path / "run").restore(7)
    with pytest.raises(ValueError, match=r"'last' or 'best', got 'lsat'"):
        counter(run=tmp_path / "run").restore("lsat")


def test_a_run_can_start_from_the_checkpoint_of_another(tmp_path):
    counter(steps=2, run=tmp_path / "first").fit()
    second = counter(steps=5, run=tmp_path / "second", save_every=1)
    assert second.restore(run=tmp_path / "first") == 2
    assert second.fit().step == 5
    assert counter(run=tmp_path / "first").restore() == 2
    # But not a licence to write into a run that is there already.
    third = counter(steps=5, run=tmp_path / "second")
    third.restore(run=tmp_path / "first")
    with pytest.raises(RuntimeError, match="holds a run already"):
        third.fit()


def test_orbax_restores_a_model_with_constraints_and_its_optimizer(tmp_path):
    """Without a trainer, as for any NNX model and optimizer."""

    def make():
        model = cx.attach(Net(), unit_hidden())
        transformation = cx.constrain(optax.adam(0.05), model)
        return model, nnx.Optimizer(model, transformation, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, batch):
        gradients = nnx.grad(squared)(model, batch)
        optimizer.update(model, gradients, batch=batch, module=model)

    batches = [batch for batch, _ in zip(arrays().from_step(0), range(4), strict=False)]
    model, optimizer = make()
    for batch in batches[:2]:
        step(model, optimizer, batch)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "saved", nnx.as_pure(nnx.state((model, optimizer))))
    for batch in batches[2:]:
        step(model, optimizer, batch)

    again = make()
    abstract = nnx.as_pure(nnx.state(again))
    with ocp.StandardCheckpointer() as checkpointer:
        nnx.update(again, checkpointer.restore(tmp_path / "saved", abstract))
    for batch in batches[2:]:
        step(*again, batch)
    wanted, found = nnx.as_pure(nnx.state((model, optimizer))), nnx.as_pure(nnx.state(again))
    assert_same_state(found, wanted)
    assert [found.constraint.label for found in cx.constraints_of(again[0])] == ["unit-norm"]


class TwoParts(nnx.Module):
    """Two modules that have a constraint of the same name each."""

    def __init__(self):
        self.parts = nnx.List([Net(), Net()])
        for part in self.parts:
            cx.attach(part, unit_hidden())

    def __call__(self, x):
        return self.parts[0](x) + self.parts[1](x)


def test_constraints_are_told_apart_by_their_modules_also_in_checkpoints(tmp_path):
    options = {"evaluation": arrays(), "run": tmp_path / "run", "save_every": 2, "steps": 4}
    straight = trainer(model=TwoParts(), **options)
    assert straight.constraint_names == ("parts.0/unit-norm", "parts.1/unit-norm")
    result = straight.fit()
    assert {"violation/parts.0/unit-norm", "violation/parts.1/unit-norm"} <= set(result.metrics)
    resumed = trainer(model=TwoParts(), **options)
    resumed.restore(2)
    assert np.isfinite(float(resumed.state.constraints.reports["parts.1/unit-norm"].violation))
    resumed.fit()
    assert_same_state(resumed.state, straight.state)


def test_a_checkpoint_with_other_arrays_is_refused_unless_told_otherwise(tmp_path, caplog):
    first = trainer(steps=2, run=tmp_path / "run")
    first.fit()
    half = jnp.bfloat16
    cases = {
        "optimizer.0.mu.hidden.bias is there and not here": {"optimizer": optax.sgd(0.1)},
        "parameters.out.bias is there and not here": {"model": Hidden(), "loss": squared},
        "parameters.hidden.kernel is float32 there and bfloat16 here": {"model": Hidden(half)},
    }
    for message, options in cases.items():
        other = trainer(**options)
        with pytest.raises(cx.CheckpointError, match="another model or optimizer") as error:
            other.restore(run=tmp_path / "run")
        assert "strict=False" in str(error.value)
        with caplog.at_level("INFO", "constrainx"):
            assert other.restore(run=tmp_path / "run", strict=False) == 2
        found, saved = other.state.parameters["hidden"], first.state.parameters["hidden"]
        dtype = found["kernel"].dtype
        np.testing.assert_array_equal(found["kernel"], saved["kernel"].astype(dtype))
        assert message in str(error.value)
        assert "in the checkpoint, not used here" in caplog.text
        caplog.clear()


class Hidden(nnx.Module):
    """`Net` without its last layer."""

    def __init__(self, dtype=jnp.float32):
        self.hidden = nnx.Linear(3, 4, rngs=nnx.Rngs(0), param_dtype=dtype)

    def __call__(self, x):
        return jnp.tanh(self.hidden(x))[:, :2]


def test_a_learning_rate_in_the_state_is_said_to_be_that_of_the_checkpoint(tmp_path, caplog):
    def make(rate):
        optimizer = optax.inject_hyperparams(optax.sgd)(learning_rate=rate)
        return counter(optimizer=optimizer, steps=4, run=tmp_path / "run")

    first = make(1.0)
    first.steps = 2
    first.fit()
    for keep, used, value in ((False, "checkpoint", -4.0), (True, "trainer", -3.0)):
        second = make(0.5)
        with caplog.at_level("INFO", "constrainx"):
            second.restore(2, keep_hyperparameters=keep)
        assert "learning_rate is 1 in the checkpoint and 0.5 in the trainer" in caplog.text
        assert f"that of the {used} is used" in caplog.text
        caplog.clear()
        assert float(second.fit().model.value[...]) == value


def test_the_best_checkpoint_needs_a_metric(tmp_path):
    counter(steps=2, run=tmp_path / "run").fit()
    with pytest.raises(cx.CheckpointError, match="monitors no metric"):
        counter(run=tmp_path / "run").restore("best")


def test_settings_that_differ_from_the_recorded_ones_are_named(tmp_path, caplog):
    run = tmp_path / "run"
    counter(steps=2, run=run, config={"seed": 0}).fit()
    # Somebody edits the seed.
    (run / "config.json").write_text('{"seed": 1}')
    for config_is_there in (True, False):
        second = counter(steps=3, run=run, config={"seed": 1}, data=ones(batch=3))
        with caplog.at_level("INFO", "constrainx"):
            second.restore()
        assert "saved with other settings: seed was 0, now 1, batch was 2, now 3" in caplog.text
        caplog.clear()
        with pytest.raises(RunError, match=r"seed was 0, now 1.*--no-strict"):
            second.fit()
        if config_is_there:
            (run / "config.json").unlink()
            with pytest.raises(RunError, match=r"no config.json, but checkpoints of a run"):
                counter(steps=2, run=run).fit()
    recorder = Recorder()
    third = counter(
        steps=3, run=run, config={"seed": 1}, callbacks=[recorder], data=ones(batch=3)
    )  # fmt: skip
    third.restore(strict=False)
    third.fit()
    assert "resumed from step 2; saved with other settings: seed" in recorder.events[0][1]


@pytest.mark.parametrize(
    ("optimizer", "said"),
    [
        (optax.adam(1e-3), ""),
        (optax.adamw(1e-3), "add_decayed_weights.weight_decay was 'nothing', now 0.0001"),
        (optax.adam(2e-3), "scale.step_size was -0.001, now -0.002"),
        (optax.adam(1e-3, b1=0.8), "scale_by_adam.b1 was 0.9, now 0.8"),
    ],
)
def test_another_optimizer_with_the_same_state_is_noticed(optimizer, said, tmp_path, caplog):
    counter(optimizer=optax.adam(1e-3), steps=2, run=tmp_path / "run").fit()
    with caplog.at_level("INFO", "constrainx"):
        counter(optimizer=optimizer, steps=3, run=tmp_path / "run").restore()
    assert ("saved with other settings" in caplog.text) == bool(said)
    assert said in caplog.text


def test_settings_of_schedules_are_read_from_the_optimizer():
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-3, 10, 90)
    found = describe_optimizer(optax.chain(optax.clip(1.0), optax.adam(schedule)))
    assert found["clip.max_delta"] == 1.0
    assert found["cosine_decay_schedule.init_value"] == 1e-3
    assert describe_optimizer("no optimizer") == {}


def test_a_trainers_model_is_the_restored_one(tmp_path):
    first = make_noisy_trainer(steps=2, run=tmp_path / "run")
    first.fit()
    second = make_noisy_trainer(steps=4, run=tmp_path / "run")
    second.restore()
    wanted = jax.tree.map(np.asarray, nnx.as_pure(nnx.state(first.model, nnx.Param)))
    assert_same_state(nnx.as_pure(nnx.state(second.model, nnx.Param)), wanted)
    assert_same_state(second.model.norm.mean[...], first.model.norm.mean[...])
    kernels = []

    class Look(cx.Callback):
        def on_log(self, step, metrics):
            kernels.append(np.asarray(second.model.hidden.kernel[...]))

    second.logging = cx.Logging(every=1, callbacks=[Look()], progress=False)
    second.fit()
    # Steps donate the state, and not what the model holds.
    np.testing.assert_array_equal(kernels, [wanted["hidden"]["kernel"]] * 2)
