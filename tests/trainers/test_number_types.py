"""Numbers that would be changed on their way into a step, or have no derivative, are refused."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import constrainx as cx

from .problems import Counter, arrays, countdown, counter

LARGE = np.array([0, 1, 2**40 + 3, 5])


@pytest.mark.parametrize("values", [LARGE, -LARGE, LARGE.astype(np.uint64)])
def test_integers_that_would_lose_their_leading_bits_are_refused(values):
    with pytest.raises(cx.UserError, match=r"'id'.*int64 and has -?1099511627779"):
        cx.data.arrays({"id": values}, batch=2)
    data = cx.data.from_iterable(lambda: iter([{"x": np.ones(4), "id": values}]), batch=4)
    for use in ("fit", "validate"):
        with pytest.raises(cx.UserError, match=r"must fit into u?int32"):
            getattr(counter(data=data, steps=1), use)()
    evaluation = counter(steps=1, evaluation=data, metrics={"id": lambda _, batch: batch["id"]})
    with pytest.raises(cx.UserError, match=r"must fit into u?int32"):
        evaluation.fit()


def test_integers_of_64_bits_that_fit_are_kept():
    values = np.array([0, 1, -(2**31), 2**31 - 1])
    data = cx.data.arrays({"x": np.ones(4, np.float32), "id": values}, batch=4, shuffle=False)
    seen = counter(data=data, evaluation=data, metrics={"id": lambda _, b: b["id"] == values})
    assert seen.evaluate()["id"] == 1


def test_an_integer_that_augmenting_removes_may_be_large():
    data = cx.data.arrays(
        {"x": np.ones(4, np.float32), "id": LARGE}, batch=2, augment=lambda b, _: {"x": b["x"]}
    )
    assert counter(data=data, steps=2).fit().step == 2


def complex_data():
    x = np.array([1 + 2j, 3 - 1j], np.complex64)
    return cx.data.arrays({"x": x}, batch=2)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (countdown, "`loss` must return a real number, got complex64"),
        (lambda model, batch: jnp.sum(model.value[...] > 0), "got int32, which has no derivative"),
        (
            lambda model, batch: (model.value[...], {"phase": batch["x"][0]}),
            "metric 'phase'.*must be real, got complex64",
        ),
    ],
)
def test_a_loss_that_is_not_real_is_refused(loss, message):
    for use in ("fit", "validate"):
        with pytest.raises(cx.UserError, match=message):
            getattr(counter(data=complex_data(), loss=loss, steps=1), use)()


def test_a_complex_metric_is_refused():
    found = counter(evaluation=complex_data(), metrics={"phase": lambda _, batch: batch["x"]})
    with pytest.raises(cx.UserError, match="metric 'phase' must return real figures"):
        found.evaluate()


def test_complex_data_with_a_real_loss_is_fine():
    def loss(model, batch):
        return jnp.mean(jnp.abs(model.value[...] * batch["x"] - batch["x"]) ** 2)

    assert counter(data=complex_data(), loss=loss, steps=2).fit().step == 2


def test_complex_parameters_are_refused():
    class Wave(Counter):
        def __init__(self):
            self.value = nnx.Param(jnp.ones((), jnp.complex64))

    with pytest.raises(cx.UserError, match=r"complex64 parameters in .*value"):
        counter(model=Wave(), data=arrays())
