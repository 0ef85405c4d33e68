"""Diagnoses of linear constraints, whose rank, angles and contradictions are known."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import constrainx as cx
from constrainx.checks import _diagnose
from tests.trainers.problems import trainer, unit_hidden

SIZE = 6


class Vector(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.linspace(0.5, 1.5, SIZE))
        self.frozen = nnx.BatchStat(jnp.ones(2))


@dataclasses.dataclass(frozen=True)
class Linear(cx.Constraint):
    """A w = b, or at most b."""

    matrix: Any = dataclasses.field(kw_only=True, hash=False)
    right: Any = dataclasses.field(kw_only=True, hash=False)

    def residual(self, model, batch, *, key):
        return jnp.asarray(self.matrix, jnp.float32) @ model.w[...] - jnp.asarray(self.right)


class AtMostLinear(Linear):
    kind = "inequality"


def entry(index, value, name, *, kind=Linear, sign=1.0):
    """sign · w[index] = value, or at most that."""
    return kind(matrix=sign * np.eye(SIZE)[index : index + 1], right=[value], name=name)


@pytest.fixture(params=["stored", "probed"])
def path(request, monkeypatch):
    """Both ways to know the rows."""
    if request.param == "probed":
        monkeypatch.setattr(_diagnose, "MOST_ROWS", 0)
    return request.param


def test_rank_condition_and_angle_are_those_of_dense_linear_algebra(path):
    rng = np.random.default_rng(0)
    matrix = np.array([100.0, 1.0, 0.01, 1.0])[:, None] * (
        rng.normal(size=(4, 3)) @ rng.normal(size=(3, SIZE))
    )
    gradient = rng.normal(size=SIZE)
    found = cx.diagnose(
        Vector(),
        Linear(matrix=matrix, right=np.zeros(4), name="low"),
        loss=lambda model, batch: jnp.dot(model.w[...], jnp.asarray(gradient, jnp.float32)),
    )
    unit = matrix / np.linalg.norm(matrix, axis=1, keepdims=True)
    sizes = np.linalg.svd(unit, compute_uv=False)[:3]
    share = np.linalg.norm(np.linalg.pinv(matrix) @ matrix @ gradient) / np.linalg.norm(gradient)
    assert (found.rows, found.rank, found["low"].rank, found.parameters) == (4, 3, 3, SIZE)
    assert found.angle == pytest.approx(np.degrees(np.arccos(share)), abs=0.05)
    assert found["low"].angle == pytest.approx(found.angle)
    assert "exactly" in found.how if path == "stored" else "estimated" in found.how
    if path == "stored":
        assert found.condition == pytest.approx(sizes[0] / sizes[2], rel=1e-4)
        assert any("span 3 dimensions" in sentence for sentence in found.advice)
    else:
        assert 1 <= found.condition <= 3 * sizes[0] / sizes[2]


@pytest.mark.parametrize(
    ("constraints", "wanted"),
    [
        ([entry(0, 1.0, "a"), entry(0, 2.0, "b"), entry(1, 0.0, "c")], {("a", "b")}),
        ([entry(0, 1.0, "a"), entry(0, 1.0, "b")], set()),
        ([entry(0, 1.0, "a"), entry(0, 1.0005, "b")], set()),  # within the tolerance
        (
            [Linear(matrix=np.eye(SIZE)[[0, 0]], right=[1.0, 2.0], name="a"), entry(1, 0.0, "c")],
            {("a",)},
        ),
        (
            [
                entry(0, 1.0, "a"),
                entry(1, 1.0, "b"),
                Linear(matrix=np.eye(SIZE)[:1] + np.eye(SIZE)[1:2], right=[5.0], name="sum"),
            ],
            {("a", "b", "sum")},
        ),
    ],
    ids=["pair", "the same", "nearly the same", "alone", "only together"],
)
def test_contradictions_are_named(constraints, wanted):
    assert set(cx.diagnose(Vector(), constraints).contradictions) == wanted


def test_contradictions_are_estimated_among_many_rows(monkeypatch):
    monkeypatch.setattr(_diagnose, "MOST_ROWS", 0)
    constraints = [entry(0, 1.0, "a"), entry(0, 2.0, "b"), entry(1, 0.0, "c")]
    assert cx.diagnose(Vector(), constraints).contradictions == (("a", "b"),)


@pytest.mark.parametrize(
    ("lower", "upper", "contradicts"), [(1.0, 0.0, True), (1.0, 3.0, False), (-1.0, 0.2, False)]
)
def test_inequalities_contradict_if_nothing_lies_between(lower, upper, contradicts):
    above = entry(0, -lower, "above", kind=AtMostLinear, sign=-1.0)
    below = entry(0, upper, "below", kind=AtMostLinear)
    found = cx.diagnose(Vector(), [above, below])
    assert found.contradictions == ((("above", "below"),) if contradicts else ())


def test_an_inequality_contradicts_an_equality():
    constraints = [entry(0, 2.0, "two"), entry(0, 1.0, "at most one", kind=AtMostLinear)]
    assert cx.diagnose(Vector(), constraints).contradictions == (("two", "at most one"),)


class Stopped(cx.Constraint):
    def residual(self, model, batch, *, key):
        w = model.w[...]
        return jnp.stack([w[0] - 2, jax.lax.stop_gradient(w[1]) - 2, 0 * w[2]])


def test_rows_without_gradient_are_counted(path):
    found = cx.diagnose(Vector(), [Stopped(), entry(3, 0.0, "other")])
    stopped = found["stopped"]
    assert (stopped.rows, stopped.rank, stopped.dead, stopped.stuck) == (3, 1, 2, 1)
    assert any("1 of 3 rows of stopped are violated and have no" in s for s in found.advice)
    assert found["other"].dead == 0


def test_rows_that_may_not_move_anything_are_dead():
    found = cx.diagnose(Vector(), dataclasses.replace(entry(0, 9.0, "a"), wrt=nnx.BatchStat))
    assert (found["a"].dead, found["a"].stuck, found.rank) == (1, 1, 0)


class NotFinite(cx.Constraint):
    def residual(self, model, batch, *, key):
        return jnp.stack([jnp.log(-model.w[...][0]), model.w[...][1]])


def test_what_is_not_finite_does_not_hide_the_rest():
    found = cx.diagnose(Vector(), [NotFinite(), entry(0, 1.0, "a"), entry(0, 2.0, "b")])
    assert found["not-finite"].nonfinite == 1
    assert found.contradictions == (("a", "b"),)
    assert any("not finite" in sentence for sentence in found.advice)


class Small(cx.Constraint):
    """Rows that cannot be taken apart by example."""

    def residual(self, model, batch, *, key):
        return jnp.cumsum(batch["x"] @ model.w[...])


def test_placement_and_solver_are_explained():
    x = np.eye(SIZE, dtype=np.float32)[np.arange(12) % SIZE]
    fresh, fixed = Small(name="fresh"), entry(0, 1.0, "fixed")
    found = cx.diagnose(Vector(), [fresh, fixed], {"x": x})
    assert (found["fresh"].placement, found["fixed"].placement) == ("gradient", "twice")
    assert "batch or the key" in found["fresh"].reason
    assert "only on the parameters" in found["fixed"].reason
    assert "LSMR" in found.solver
    assert "13 rows share their examples, more than the 8" in found.reason
    method = cx.NullSpace(placement="update", solver="gram")
    found = cx.diagnose(Vector(), [fresh, fixed], {"x": x}, method=method)
    assert (found["fresh"].placement, found["fresh"].reason) == ("update", "the method says so")
    assert (found.solver, found.reason) == ("Gram matrix", 'solver="gram" was given')
    found = cx.diagnose(Vector(), fixed, method="penalty")
    assert (found["fixed"].placement, found.solver) == ("none", "none")


def test_a_gradient_that_is_projected_out_entirely_is_reported():
    found = cx.diagnose(
        Vector(),
        Linear(matrix=np.eye(SIZE), right=np.zeros(SIZE), name="all"),
        loss=lambda model, batch: jnp.sum(model.w[...] ** 2),
    )
    assert found.angle == pytest.approx(0, abs=0.1)
    assert any("nothing is left for the loss" in sentence for sentence in found.advice)


def test_integers_that_would_lose_their_leading_bits_are_refused():
    batch = {"label": np.full(3, 2**40 + 3)}
    with pytest.raises(ValueError, match=r"the batch must fit into int32.*1099511627779"):
        cx.diagnose(Vector(), entry(0, 0.0, "zero"), batch)


def test_a_trainer_is_diagnosed_where_it_is():
    made = trainer(constraints=[unit_hidden()])
    text = str(found := made.diagnose())
    kernel = np.asarray(made.state.parameters["hidden"]["kernel"], np.float64)
    assert found["unit-norm"].violation == pytest.approx(abs(np.sum(kernel**2) - 1), rel=1e-5)
    assert found.loss.seconds > 0
    assert found["unit-norm"].cost.operations > 0
    assert max(map(len, text.splitlines())) <= 80
    assert "closed form, because there is one row" in text
    made.fit()
    assert made.diagnose()["unit-norm"].violation < found["unit-norm"].violation
