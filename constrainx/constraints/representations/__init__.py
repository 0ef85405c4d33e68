"""Representations: how an element of a group acts on an array.

Each is a frozen dataclass that is called with a group, an element and the array of one example,
without the batch axis, such that ρ(gh) = ρ(g)ρ(h). Shapes stay as they are.

>>> import jax.numpy as jnp
>>> from constrainx.constraints import groups, representations
>>> half_turn = 2
>>> representations.Image()(groups.Cyclic(4), half_turn, jnp.arange(4).reshape(2, 2)).tolist()
[[3, 2], [1, 0]]
>>> masses_and_positions = representations.Sum(
...     (5, representations.Trivial()), (15, representations.Vector())
... )
"""

from constrainx.constraints._symmetry import Representation as Representation
from constrainx.constraints.representations._image import Image as Image
from constrainx.constraints.representations._permute import Permute as Permute
from constrainx.constraints.representations._regular import Regular as Regular
from constrainx.constraints.representations._sum import Sum as Sum
from constrainx.constraints.representations._tensor import Tensor as Tensor
from constrainx.constraints.representations._tensor import Vector as Vector
from constrainx.constraints.representations._trivial import Trivial as Trivial
