"""Symmetry groups: their elements, products and inverses, and uniform samples.

An element is an integer or an array, of one shape for each group, so that all of this works under
`jit` and `vmap`. How an element acts on data is what a representation says, see `representations`.

>>> import jax
>>> from constrainx.constraints import groups
>>> square = groups.Dihedral(4)
>>> turn, flip = square.generators
>>> bool(square.compose(flip, turn) == square.compose(square.inverse(turn), flip))
True
>>> groups.SpecialOrthogonal(3).sample(jax.random.key(0), 10).shape
(10, 3, 3)
"""

from constrainx.constraints._symmetry import Element as Element
from constrainx.constraints._symmetry import FiniteGroup as FiniteGroup
from constrainx.constraints._symmetry import Group as Group
from constrainx.constraints._symmetry import NumberedGroup as NumberedGroup
from constrainx.constraints._symmetry import PermutingGroup as PermutingGroup
from constrainx.constraints._symmetry import PixelGroup as PixelGroup
from constrainx.constraints.groups._matrix import MatrixGroup as MatrixGroup
from constrainx.constraints.groups._orthogonal import Orthogonal as Orthogonal
from constrainx.constraints.groups._orthogonal import SpecialOrthogonal as SpecialOrthogonal
from constrainx.constraints.groups._permutation import Permutation as Permutation
from constrainx.constraints.groups._polygon import Cyclic as Cyclic
from constrainx.constraints.groups._polygon import Dihedral as Dihedral
from constrainx.constraints.groups._translation import Translation as Translation
