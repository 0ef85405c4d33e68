"""Reductions: how the raw residuals of a constraint become the rows of c.

The number of rows is what a step pays for. Write a reduction of your own as a frozen dataclass with
a ``__call__``, and with ``slices`` if each row depends on its own examples, see `Reduction`:

>>> import dataclasses, jax.numpy as jnp, constrainx as cx
>>> from constrainx.constraints.reductions import flatten
>>> @dataclasses.dataclass(frozen=True)
... class SumAndLargest:
...     def __call__(self, residual, *, key):
...         entries = flatten(residual)
...         return jnp.stack([jnp.sum(entries), jnp.max(entries)])
>>> norm = cx.UnitNorm(of=lambda model: model.kernel[...], axis=0, reduce=SumAndLargest())
"""

from constrainx.constraints.reductions._clipped import Clipped as Clipped
from constrainx.constraints.reductions._each import Each as Each
from constrainx.constraints.reductions._flatten import check_residual as check_residual
from constrainx.constraints.reductions._flatten import flatten as flatten
from constrainx.constraints.reductions._mean import Mean as Mean
from constrainx.constraints.reductions._norm import Norm as Norm
from constrainx.constraints.reductions._reduction import Reduction as Reduction
from constrainx.constraints.reductions._reduction import Rows as Rows
from constrainx.constraints.reductions._reduction import SlicedReduction as SlicedReduction
from constrainx.constraints.reductions._reduction import slices_of as slices_of
from constrainx.constraints.reductions._root_mean_square import RootMeanSquare as RootMeanSquare
from constrainx.constraints.reductions._root_mean_square import root_mean_square as root_mean_square
from constrainx.constraints.reductions._sketch import Sketch as Sketch
