"""Symmetry groups: their elements, products and inverses, and uniform samples.

An element is an integer or an array, of one shape for each group, so that all of this works under
`jit` and `vmap`. How an element acts on data is the business of `representations`.

>>> import jax
>>> from constrainx.constraints import groups
>>> square = groups.Dihedral(4)
>>> turn, flip = square.generators
>>> bool(square.compose(flip, turn) == square.compose(square.inverse(turn), flip))
True
>>> groups.SpecialOrthogonal(3).sample(jax.random.key(0), 10).shape
(10, 3, 3)
"""

from constrainx.constraints.groups._group import Element as Element
from constrainx.constraints.groups._group import FiniteGroup as FiniteGroup
from constrainx.constraints.groups._group import Group as Group
from constrainx.constraints.groups._matrix import MatrixGroup as MatrixGroup
from constrainx.constraints.groups._orthogonal import Orthogonal as Orthogonal
from constrainx.constraints.groups._orthogonal import SpecialOrthogonal as SpecialOrthogonal
from constrainx.constraints.groups._permutation import Permutation as Permutation
from constrainx.constraints.groups._permutation import Translation as Translation
from constrainx.constraints.groups._polygon import Cyclic as Cyclic
from constrainx.constraints.groups._polygon import Dihedral as Dihedral
