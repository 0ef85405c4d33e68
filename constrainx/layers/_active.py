"""Which inequalities of a small quadratic program are active."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

# How often all rows with a wrong sign may change sides without their number falling.
PATIENCE = 3


class Pivoted(NamedTuple):
    """The solution of a quadratic program with bounds.

    Attributes:
        multipliers: λ, at least zero.
        iterations: linear systems solved.
    """

    multipliers: Float[Array, " rows"]
    iterations: Int[Array, ""]


def solve_bounded_dense(
    gram: Float[Array, "rows rows"], right: Float[Array, " rows"], *, damping: float
) -> Pivoted:
    """Minimises ½ λᵀG λ − λᵀe over λ ≥ 0, to the last digit.

    Many rows at once first, which takes few rounds; where that does not end, which is where many
    rows meet in few dimensions, one by one.

    Args:
        gram: G, positive semidefinite, with a diagonal of about ones.
        right: e.
        damping: δ, so small that it is rounding, which makes G + δI definite.
    """
    system = _System(gram, right, gram + damping * jnp.eye(len(right), dtype=right.dtype), damping)
    return _add_rows(system, _exchange_blocks(system))


class _System(NamedTuple):
    gram: Float[Array, "rows rows"]
    right: Float[Array, " rows"]
    damped: Float[Array, "rows rows"]
    damping: float

    def solve(self, free: Bool[Array, " rows"], right: Float[Array, " rows"]) -> Array:
        """Solves for the free rows; zero elsewhere."""
        both = free[:, None] & free[None, :]
        identity = jnp.eye(len(right), dtype=right.dtype)
        factor = jnp.linalg.cholesky(jnp.where(both, self.damped, identity))
        return jax.scipy.linalg.cho_solve((factor, True), jnp.where(free, right, 0))

    def violate(self, multipliers: Float[Array, " rows"]) -> Float[Array, " rows"]:
        """By how much each row is violated, e − G λ, and zero if that may be rounding."""
        left = self.right - jnp.matmul(self.gram, multipliers, precision="highest")
        sizes = jnp.abs(self.right) + jnp.abs(self.gram) @ jnp.abs(multipliers)
        rounding = 4 * jnp.finfo(left.dtype).eps * sizes
        return jnp.where(left > rounding, left, 0)


class _Blocks(NamedTuple):
    free: Bool[Array, " rows"]
    multipliers: Float[Array, " rows"]
    wrong: Bool[Array, " rows"]
    fewest: Int[Array, ""]
    patience: Int[Array, ""]
    iterations: Int[Array, ""]


def _exchange_blocks(system: _System) -> _Blocks:
    """Block principal pivoting.

    Solves for the rows that are free, and lets all rows whose sign is wrong change sides at once,
    be it a negative λ of a free row or a violated row that is not free. (Portugal, Júdice and
    Vicente, "A comparison of block pivoting and interior-point algorithms for linear least squares
    problems with nonnegative variables", 1994.)
    """
    rows = len(system.right)

    def pivot(free: Array) -> tuple[Array, Array]:
        multipliers = system.solve(free, system.right)
        rounding = 4 * jnp.finfo(multipliers.dtype).eps * jnp.max(jnp.abs(multipliers))
        return multipliers, jnp.where(
            free, multipliers < -rounding, system.violate(multipliers) > 0
        )

    def go_on(state: _Blocks) -> Bool[Array, ""]:
        return jnp.any(state.wrong) & (state.patience >= 0)

    def exchange(state: _Blocks) -> _Blocks:
        free = state.free ^ state.wrong
        multipliers, wrong = pivot(free)
        count = jnp.sum(wrong, dtype=jnp.int32)
        patience = jnp.where(count < state.fewest, PATIENCE, state.patience - 1)
        fewest = jnp.minimum(count, state.fewest)
        return _Blocks(free, multipliers, wrong, fewest, patience, state.iterations + 1)

    free = system.right > 0
    first = _Blocks(
        free,
        *pivot(free),
        fewest=jnp.asarray(rows + 1, jnp.int32),
        patience=jnp.asarray(PATIENCE, jnp.int32),
        iterations=jnp.ones((), jnp.int32),
    )
    return jax.lax.while_loop(go_on, exchange, first)


class _Adding(NamedTuple):
    multipliers: Float[Array, " rows"]
    held: Bool[Array, " rows"]
    given_up: Bool[Array, " rows"]
    entering: Int[Array, ""]
    done: Bool[Array, ""]
    iterations: Int[Array, ""]


def _add_rows(system: _System, blocks: _Blocks) -> Pivoted:
    """The dual method of Goldfarb and Idnani, from λ = 0, unless blocks have found the solution.

    Takes in the row that is violated most and raises its λ until it holds, or until the λ of a row
    that is held falls to zero, which is then let go. It ends after finitely many rounds, and
    needs no damping, as rows that are held are independent. A row that contradicts those held is
    given up. (Goldfarb and Idnani, "A numerically stable dual method for solving strictly convex
    quadratic programs", 1983.)
    """
    rows = len(system.right)
    epsilon = jnp.finfo(system.right.dtype).eps
    nobody = jnp.asarray(rows, jnp.int32)
    most = 10 * rows + 20

    def go_on(state: _Adding) -> Bool[Array, ""]:
        return ~state.done & (state.iterations < most)

    def add(state: _Adding) -> _Adding:
        violated = system.violate(state.multipliers)
        waiting = jnp.where(state.held | state.given_up, 0, violated)
        strongest = jnp.argmax(waiting).astype(jnp.int32)
        row = jnp.where(state.entering == nobody, strongest, state.entering)
        done = jnp.max(waiting, initial=0.0) <= 0
        is_row = jnp.arange(rows) == row

        trade = system.solve(state.held, system.gram[row])
        outside = system.gram[row, row] - system.gram[row] @ trade
        independent = outside > 4 * system.damping
        whole = jnp.where(independent, violated[row] / outside, jnp.inf)
        falling = state.held & (trade > epsilon)
        reach = jnp.where(falling, state.multipliers / jnp.where(falling, trade, 1), jnp.inf)
        leaving = jnp.argmin(reach)
        taken = jnp.minimum(whole, reach[leaving])
        impossible = ~jnp.isfinite(taken)
        is_let_go = ~done & (reach[leaving] < whole)

        change = jnp.where(impossible | done, 0, taken) * (is_row - trade)
        multipliers = jnp.maximum(state.multipliers + change, 0)
        let_go = is_let_go & (jnp.arange(rows) == leaving)
        takes_in = ~is_let_go & ~impossible & ~done
        return _Adding(
            jnp.where(let_go, 0, multipliers),
            (state.held & ~let_go) | (takes_in & is_row),
            state.given_up | (impossible & ~done & is_row),
            jnp.where(is_let_go, row, nobody),
            done,
            state.iterations + 1,
        )

    solved = ~jnp.any(blocks.wrong)
    none = jnp.zeros(rows, bool)
    start = jnp.where(solved, blocks.multipliers, 0)
    first = _Adding(start, none, none, nobody, solved, jnp.zeros((), jnp.int32))
    last = jax.lax.while_loop(go_on, add, first)
    return Pivoted(jnp.maximum(last.multipliers, 0), blocks.iterations + last.iterations)
