"""Reservoirs, and memories that are a part of a model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import constrainx as cx
from constrainx.data import Memory, Reservoir

SIZE, BATCH, STEPS = 6, 5, 4


def fill(key):
    """A stream of 20 numbers, in batches."""
    reservoir = Reservoir.empty(jnp.zeros((), jnp.int32), size=SIZE)
    for step in range(STEPS):
        batch = BATCH * step + jnp.arange(BATCH)
        reservoir = reservoir.add(batch, jax.random.fold_in(key, step))
    return reservoir


def test_a_reservoir_does_what_a_loop_over_examples_does():
    key = jax.random.key(3)
    found = fill(key)
    places = [None] * SIZE
    for step in range(STEPS):
        own = jax.random.fold_in(key, step)
        positions = BATCH * step + np.arange(BATCH)
        drawn = np.asarray(jax.random.randint(own, (BATCH,), 0, positions + 1))
        for position, place in zip(positions, drawn, strict=True):
            place = position if position < SIZE else place
            if place < SIZE:
                places[place] = position
    assert found.examples.tolist() == [int(place) for place in places]
    assert int(found.seen) == STEPS * BATCH


def test_every_example_stays_with_the_same_probability():
    runs = 4000
    kept = jax.jit(jax.vmap(lambda key: fill(key).examples))(
        jax.random.split(jax.random.key(0), runs)
    )
    assert all(len(set(row)) == SIZE for row in np.asarray(kept[:50]).tolist())
    counts = np.bincount(np.asarray(kept).ravel(), minlength=STEPS * BATCH)
    share = SIZE / (STEPS * BATCH)
    spread = np.sqrt(runs * share * (1 - share))
    assert np.abs(counts - runs * share).max() < 4.5 * spread


def test_draws_are_different_examples_that_are_ready():
    memory = Memory(8, only="ready", x=jnp.zeros(2), ready=jnp.zeros(()))
    memory.add(jax.random.key(0), x=jnp.arange(10.0).reshape(5, 2))
    assert float(memory.draw(3, jax.random.key(1))[1].sum()) == 0
    memory.replace(ready=jnp.asarray([1.0, 1, 0, 1, 0, 1, 1, 1]))
    drawn, weights = memory.draw(4, jax.random.key(1))
    # The last three places are empty, whatever they say.
    assert sorted(drawn["x"][weights > 0, 0].tolist()) == [0, 2, 6]
    assert memory.everything()[1].tolist() == [1, 1, 0, 1, 0, 0, 0, 0]
    pairs = {tuple(memory.draw(2, jax.random.key(k))[0]["x"][:, 0].tolist()) for k in range(30)}
    assert pairs == {(a, b) for a in (0, 2, 6) for b in (0, 2, 6) if a != b}


def test_mistakes_are_named():
    with pytest.raises(cx.UserError, match=r"Memory\(only='redy'\).*Did you mean 'ready'"):
        Memory(8, only="redy", ready=jnp.zeros(()))
    memory = Memory(8, x=jnp.zeros(2))
    with pytest.raises(cx.UserError, match=r"entries \['x'\], got 'y'"):
        memory.add(jax.random.key(0), y=jnp.zeros((3, 2)))
    with pytest.raises(cx.UserError, match=r"must have the shape \(3, 2\)"):
        memory.add(jax.random.key(0), x=jnp.zeros((3, 4)))
    with pytest.raises(cx.UserError, match="asked for 9"):
        memory.draw(9, jax.random.key(0))


def test_sources_come_in_turn_and_from_any_step():
    sources = [
        cx.data.arrays({"x": np.arange(6) + 10 * k}, batch=4, seed=k, shuffle=False)
        for k in range(3)
    ]
    data = cx.data.in_turn(sources, steps=3)

    def read(step, count, **where):
        batches = data.from_step(step, **where)
        return [next(batches)["x"].tolist() for _ in range(count)]

    whole = read(0, 11)
    assert whole[:3] == [[0, 1, 2, 3], [4, 5, 0, 1], [2, 3, 4, 5]]
    assert whole[3] == [10, 11, 12, 13]
    # The last goes on.
    assert whole[9] == [20 + (12 + i) % 6 for i in range(4)]
    for step in (2, 3, 8, 10):
        assert read(step, 1) == whole[step : step + 1]
    assert read(2, 2, process=1, processes=2) == [row[2:] for row in whole[2:4]]
    with pytest.raises(cx.UserError, match=r"one size, got \[2, 4\]"):
        cx.data.in_turn([*sources, cx.data.arrays({"x": np.arange(6)}, batch=2)], steps=3)
