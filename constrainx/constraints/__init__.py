"""Constraints as objects."""

from constrainx.constraints import groups as groups
from constrainx.constraints import masks as masks
from constrainx.constraints import reductions as reductions
from constrainx.constraints import representations as representations
from constrainx.constraints._attach import Attached as Attached
from constrainx.constraints._attach import at_path as at_path
from constrainx.constraints._attach import attach as attach
from constrainx.constraints._attach import constraints_of as constraints_of
from constrainx.constraints._compose import Composed as Composed
from constrainx.constraints._compose import Member as Member
from constrainx.constraints._compose import compose as compose
from constrainx.constraints._compose import cut_batch as cut_batch
from constrainx.constraints._constraint import Constraint as Constraint
from constrainx.constraints._constraint import Placement as Placement
from constrainx.constraints._equivariance import Equivariance as Equivariance
from constrainx.constraints._equivariance import Invariance as Invariance
from constrainx.constraints._inequality import AtMost as AtMost
from constrainx.constraints._jacobian_symmetry import JacobianSymmetry as JacobianSymmetry
from constrainx.constraints._mask_budget import MaskBudget as MaskBudget
from constrainx.constraints._view import reseed_streams as reseed_streams
from constrainx.constraints._weights import Orthogonality as Orthogonality
from constrainx.constraints._weights import UnitNorm as UnitNorm
from constrainx.constraints.reductions import Norm as Norm
from constrainx.constraints.reductions import Reduction as Reduction
from constrainx.constraints.reductions import Sketch as Sketch
