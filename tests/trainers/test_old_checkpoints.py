"""Checkpoints that were written before the code moved into rooms still restore."""

import pathlib
import tarfile

import jax
import numpy as np
import optax
import pytest

import constrainx as cx

from .problems import Net, arrays, by_hand, flat, trainer, unit_hidden

RUNS = pathlib.Path(__file__).parent / "runs-before-rooms.tar.gz"
METHODS = {
    "update": cx.NullSpace(placement="update"),
    "gradient": cx.NullSpace(placement="gradient"),
    "penalty": cx.Penalty(),
    "lagrangian": cx.Lagrangian(),
    "none": "none",
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("old")
    with tarfile.open(RUNS) as archive:
        archive.extractall(folder, filter="data")
    return folder / "old-runs"


@pytest.mark.parametrize("name", METHODS)
def test_an_old_run_continues(runs, name):
    continued = trainer(constraints=[unit_hidden()], method=METHODS[name], run=runs / name, steps=5)
    assert continued.restore() == 3
    restored = flat(continued.state.parameters)
    if name in ("update", "none"):
        path, _ = by_hand(
            Net(),
            optax.adam(0.05),
            arrays(),
            3,
            unit_norm=0.5 if name == "update" else None,
            placement="update",
        )
        np.testing.assert_allclose(restored, path[3], rtol=1e-5, atol=1e-6)
    moments = jax.tree.leaves(continued.state.optimizer)
    assert any(np.any(np.asarray(leaf) != 0) for leaf in moments)
    if name == "lagrangian":
        (multiplier,) = jax.tree.leaves(continued.state.constraints.multipliers)
        assert np.all(np.asarray(multiplier) != 0)
    if name != "none":
        assert int(continued.state.constraints.step) == 3
        assert np.isfinite(float(cx.reports(continued.state.constraints)["unit-norm"].violation))
    assert continued.fit().step == 5
    assert np.all(np.isfinite(flat(continued.state.parameters)))
