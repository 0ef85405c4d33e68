"""The equations of one Gauss-Newton step, and what is measured before and after it.

With J for the Jacobian of the rows c, and K for that of the outputs to be kept, a step solves

    min ‖Δ‖² + w²‖K Δ‖²   under   J Δ = −c.

That is the solution of minimum norm of a system without weights on its equations,

    [J   0] [Δ]   [−c]
    [wK −I] [s] = [ 0],

which `lstsq` finds with products alone, whatever the rank of J. With damping λ it minimises
‖J Δ + c‖² + λ²(‖Δ‖² + …) instead, the step of Levenberg and Marquardt.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, PyTree

from constrainx.constraints import Member, at_path, reseed_streams
from constrainx.constraints.reductions import flatten, root_mean_square
from constrainx.linalg import Solver, dot, lstsq
from constrainx.polishing._points import Points, Reads, map_points, weigh_points
from constrainx.step import pull_rows

# For each constraint, and for each size of a batch, the rows of all batches and draws.
Blocks: TypeAlias = list[list[Float[Array, "..."]]]

# How often inequalities that a step would break may join it.
ROUNDS = 8


class Given(NamedTuple):
    """What a step does not change.

    Attributes:
        held: parameters that no constraint may move.
        rest: what else the model holds.
        rngs: its random streams.
        points: where the constraints are to hold.
        kept_points: where outputs are to be kept; None for nowhere.
        kept: these outputs, before.
        scales: what the rows of each constraint are multiplied by, so that they have length one on
            average; and, last, the outputs to be kept.
    """

    held: list[Array]
    rest: PyTree
    rngs: PyTree
    points: Points
    kept_points: Points | None
    kept: list[Array] | None
    scales: tuple[Any, ...]


class Step(NamedTuple):
    """A Gauss-Newton step, by host or device.

    Attributes:
        change: of the parameters.
        descent: the fraction of ‖c‖² / 2 that a step of this length would remove if it were short,
            between 0 and 1: −⟨c, J Δ⟩ / ‖c‖². Near zero where rows contradict each other.
        converged: whether the solver did.
        iterations: of the solver.
    """

    change: list[Array]
    descent: Float[Array, ""] | float
    converged: Bool[Array, ""] | bool
    iterations: Int[Array, ""] | int


class Measured(NamedTuple):
    """What is known of a model.

    Attributes:
        size: the norm of all violated rows, scaled.
        violations: of each constraint.
        counts: how many rows each has.
        loss: not a number if there is none.
        change: the root mean square of what became different in outputs to be kept.
        outputs: the root mean square of these outputs.
    """

    size: Float[Array, ""]
    violations: list[Float[Array, ""]]
    counts: list[Int[Array, ""]]
    loss: Float[Array, ""]
    change: Float[Array, ""]
    outputs: Float[Array, ""]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class System:
    """All constraints as one function of the parameters that may move.

    Attributes:
        graph: of the model.
        structure: of its parameters.
        moves: for each parameter, whether it may move.
        members: the constraints that have rows.
        reads: what the rows of each depend on.
        of: (model, batch) ↦ the outputs to be kept.
        is_hard: whether these outputs are rows, too.
        loss: (model, batch, key) ↦ a number, or None.
    """

    graph: nnx.GraphDef
    structure: Any
    moves: tuple[bool, ...]
    members: tuple[Member, ...]
    reads: tuple[Reads, ...]
    of: Callable[[Any, Any], PyTree]
    is_hard: bool
    loss: Callable[[Any, Any, Array], Array] | None

    @functools.cached_property
    def compiled_measure(self) -> Callable[..., tuple[list[Array], Measured]]:
        """`measure`, compiled once."""
        return jax.jit(self.measure)

    def parameters(self, moved: list[Array], held: list[Array]) -> PyTree:
        """All parameters."""
        from_moved, from_held = iter(moved), iter(held)
        leaves = [next(from_moved) if moves else next(from_held) for moves in self.moves]
        return jax.tree.unflatten(self.structure, leaves)

    def rebuild(self, moved: list[Array], given: Given, key: Array) -> Any:
        """The model in evaluation mode, its random streams seeded."""
        rngs = reseed_streams(given.rngs, key)
        parameters = self.parameters(moved, given.held)
        model = nnx.merge(self.graph, parameters, rngs, given.rest, copy=True)
        model.eval()
        return model

    def rows(self, moved: list[Array], given: Given) -> Blocks:
        """The rows of all constraints, unscaled."""
        parameters = self.parameters(moved, given.held)
        model = nnx.merge(self.graph, parameters, given.rngs, given.rest, copy=True)
        return [
            map_points(
                lambda b, k, m=member: m.rows(parameters, b, k, model),  # type: ignore[misc]
                given.points,
                reads,
                index=index,
            )
            for index, (member, reads) in enumerate(zip(self.members, self.reads, strict=True))
        ]

    def outputs(self, moved: list[Array], given: Given) -> list[Array]:
        """The outputs to be kept, unscaled."""
        if given.kept_points is None:
            return []

        def look(batch: Any, key: Array) -> Array:
            model = self.rebuild(moved, given, key)
            return flatten(self.of(model, batch), owner="outputs to be kept")

        return map_points(look, given.kept_points, Reads(batch=True, key=False), index=0)

    def find_outputs(self, moved: list[Array], given: Given) -> list[Array]:
        """The outputs to be kept, as they are now."""
        return self.outputs(moved, given)

    def push(
        self, moved: list[Array], directions: list[list[Array]], given: Given
    ) -> list[list[Array]]:
        """J v for several v: for each, the mean square of what it makes of each constraint's rows.

        The last entry is that of the outputs to be kept.
        """

        def everything(moved: list[Array]) -> list[list[Array]]:
            return [*self.rows(moved, given), self.outputs(moved, given)]

        _, push = jax.linearize(everything, moved)
        return [[_mean_square(block) for block in push(one)] for one in directions]

    def differentiate(
        self, moved: list[Array], given: Given
    ) -> tuple[list[Float[Array, ...]], list[Float[Array, ...]]]:
        """The values of each constraint's rows and, last, of the outputs; and all gradients."""

        def everything(moved: list[Array]) -> tuple[Array, list[Array]]:
            blocks = [*self.rows(moved, given), self.outputs(moved, given)]
            flat = [_flatten(block) for block in blocks]
            return jnp.concatenate(flat), flat

        values, pullback, flat = jax.vjp(everything, moved, has_aux=True)
        (gradients,) = pull_rows(pullback, jnp.eye(values.size, dtype=values.dtype))
        return flat, gradients

    def step(self, moved: list[Array], given: Given, damping: Array, solver: Solver) -> Step:
        """The Gauss-Newton step; with damping, a shorter one."""

        def everything(moved: list[Array]) -> tuple[Blocks, list[Array]]:
            outputs = [leaf * given.scales[-1] for leaf in self.outputs(moved, given)]
            rows = self._scaled(self.rows(moved, given), given)
            return self._join(rows, outputs, given)

        (values, soft), push = jax.linearize(everything, moved)
        violated = self._find_violated(values)
        wanted = _select(violated, values)

        def solve(active: PyTree) -> tuple[list[Array], Blocks, Any]:
            def apply(pair: tuple[list[Array], list[Array]]) -> tuple[Blocks, list[Array]]:
                pushed, outputs = push(pair[0])
                return _select(active, pushed), jax.tree.map(jnp.subtract, outputs, pair[1])

            right = jax.tree.map(jnp.negative, _select(active, values))
            (change, _), info = lstsq(
                apply,
                (right, jax.tree.map(jnp.zeros_like, soft)),
                like=(moved, soft),
                damp=damping,
                solver=solver,
                is_linear=True,
            )
            return change, push(change)[0], info

        solved = solve(violated)
        if any(member.kind == "inequality" for member in self.members):
            solved = self._add_inequalities(solve, values, violated, solved)
        change, pushed, info = solved
        size = dot(wanted, wanted)
        descent = -dot(wanted, pushed) / jnp.where(size > 0, size, 1)
        return Step(change, descent, info.converged, info.iterations)

    def measure(
        self, moved: list[Array], change: list[Array], length: Array, given: Given
    ) -> tuple[list[Array], Measured]:
        """The parameters after a step, and how well the constraints then hold."""
        moved = [p + (length * d).astype(p.dtype) for p, d in zip(moved, change, strict=True)]
        outputs = self.outputs(moved, given)
        before = outputs if given.kept is None else given.kept
        changes = jax.tree.map(jnp.subtract, outputs, before)
        scaled = [leaf * given.scales[-1] for leaf in outputs]
        rows = self.rows(moved, given)
        values, _ = self._join(self._scaled(rows, given), scaled, given)
        violated = _select(self._find_violated(values), values)
        return moved, Measured(
            size=jnp.sqrt(dot(violated, violated)),
            violations=[
                self._measure_violation(index, own, moved, given) for index, own in enumerate(rows)
            ],
            counts=[jnp.asarray(sum(leaf.size for leaf in own)) for own in rows],
            loss=self._measure_loss(moved, given),
            change=jnp.sqrt(_mean_square(changes)),
            outputs=jnp.sqrt(_mean_square(before)),
        )

    def _scaled(self, rows: Blocks, given: Given) -> Blocks:
        return [
            [leaf * scale for leaf in block]
            for block, scale in zip(rows, given.scales[:-1], strict=True)
        ]

    def _join(self, rows: Blocks, outputs: list[Array], given: Given) -> tuple[Blocks, list[Array]]:
        """Outputs that must not change are rows: of what has become different so far."""
        if not self.is_hard or given.kept is None:
            return rows, outputs
        kept = [leaf * given.scales[-1] for leaf in given.kept]
        return [*rows, jax.tree.map(jnp.subtract, outputs, kept)], []

    def _find_violated(self, values: Blocks) -> PyTree:
        """For each row, whether it acts: an inequality that holds does not."""
        kinds = [member.kind for member in self.members]
        kinds += ["equality"] * (len(values) - len(kinds))
        return [
            [leaf > 0 if kind == "inequality" else jnp.ones(leaf.shape, bool) for leaf in block]
            for block, kind in zip(values, kinds, strict=True)
        ]

    def _add_inequalities(
        self, solve: Callable[[PyTree], Any], values: Blocks, active: PyTree, solved: Any
    ) -> Any:
        """Solves again with inequalities that the step would break, until it breaks none."""

        def find_broken(pushed: Blocks, active: PyTree) -> PyTree:
            after = jax.tree.map(jnp.add, values, pushed)
            largest = functools.reduce(
                jnp.maximum, [jnp.max(jnp.abs(leaf)) for leaf in jax.tree.leaves(values)]
            )
            return jax.tree.map(lambda leaf, known: (leaf > 1e-5 * largest) & ~known, after, active)

        def keep_inequalities(broken: PyTree) -> PyTree:
            return [
                block if index < len(self.members) and self.members[index].kind == "inequality"
                else jax.tree.map(jnp.zeros_like, block)
                for index, block in enumerate(broken)
            ]  # fmt: skip

        def go_on(carry: Any) -> Array:
            _, (_, pushed, _), rounds = carry
            broken = keep_inequalities(find_broken(pushed, carry[0]))
            return (rounds < ROUNDS) & _any(broken)

        def improve(carry: Any) -> Any:
            active, (_, pushed, _), rounds = carry
            broken = keep_inequalities(find_broken(pushed, active))
            wider = jax.tree.map(jnp.logical_or, active, broken)
            return wider, solve(wider), rounds + 1

        return jax.lax.while_loop(go_on, improve, (active, solved, jnp.zeros((), jnp.int32)))[1]

    def _measure_violation(
        self, index: int, rows: list[Array], moved: list[Array], given: Given
    ) -> Float[Array, ""]:
        """The constraint's own figure, as a mean over examples; or that of its rows."""
        member, reads = self.members[index], self.reads[index]
        found = member.attached
        if found is None or found.constraint.reduce == "mean":
            entries = jnp.concatenate([leaf.reshape(-1) for leaf in rows])
            is_inequality = member.kind == "inequality"
            return root_mean_square(jnp.maximum(entries, 0) if is_inequality else entries)

        def look(batch: Any, key: Array) -> Array:
            model = self.rebuild(moved, given, jax.random.fold_in(key, 2))
            # The key that the rows are drawn by, so that the points are the same.
            own, _ = jax.random.split(key)
            return found.constraint.violation(at_path(model, found.path), batch, own)

        return _average(map_points(look, given.points, reads, index=index), given.points, reads)

    def _measure_loss(self, moved: list[Array], given: Given) -> Float[Array, ""]:
        loss = self.loss
        if loss is None:
            return jnp.asarray(jnp.nan)
        reads = Reads(batch=True, key=False)

        def look(batch: Any, key: Array) -> Array:
            return loss(self.rebuild(moved, given, jax.random.fold_in(key, 2)), batch, key)

        return _average(
            map_points(look, given.points, reads, index=len(self.members)), given.points, reads
        )


def _flatten(block: list[Array]) -> Float[Array, " rows"]:
    return jnp.concatenate([jnp.zeros(0), *[leaf.reshape(-1) for leaf in block]])


def _average(found: list[Array], points: Points, reads: Reads) -> Float[Array, ""]:
    weights = weigh_points(points, reads)
    total = sum(float(weight.sum()) for weight in weights)
    pairs = zip(found, weights, strict=True)
    return sum((jnp.sum(leaf * weight) for leaf, weight in pairs), jnp.zeros(())) / total


def _select(mask: PyTree, values: PyTree) -> PyTree:
    return jax.tree.map(lambda m, v: jnp.where(m, v, 0), mask, values)


def _mean_square(leaves: list[Array]) -> Float[Array, ""]:
    count = max(sum(leaf.size for leaf in leaves), 1)
    return dot(leaves, leaves) / count


def _any(flags: PyTree) -> Bool[Array, ""]:
    return functools.reduce(jnp.logical_or, [jnp.any(leaf) for leaf in jax.tree.leaves(flags)])
