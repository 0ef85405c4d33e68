"""Train neural networks that must obey constraints."""

from constrainx import data as data
from constrainx.constraints import AtMost as AtMost
from constrainx.constraints import Attached as Attached
from constrainx.constraints import Composed as Composed
from constrainx.constraints import Constraint as Constraint
from constrainx.constraints import Equivariance as Equivariance
from constrainx.constraints import Invariance as Invariance
from constrainx.constraints import JacobianSymmetry as JacobianSymmetry
from constrainx.constraints import MaskBudget as MaskBudget
from constrainx.constraints import Norm as Norm
from constrainx.constraints import Orthogonality as Orthogonality
from constrainx.constraints import Sketch as Sketch
from constrainx.constraints import UnitNorm as UnitNorm
from constrainx.constraints import attach as attach
from constrainx.constraints import compose as compose
from constrainx.constraints import constraints_of as constraints_of
from constrainx.constraints import groups as groups
from constrainx.constraints import masks as masks
from constrainx.constraints import representations as representations
from constrainx.errors import UserError as UserError
from constrainx.linalg import CG as CG
from constrainx.linalg import LSMR as LSMR
from constrainx.linalg import QR as QR
from constrainx.linalg import Cholesky as Cholesky
from constrainx.linalg import Info as Info
from constrainx.linalg import LeastSquares as LeastSquares
from constrainx.linalg import LinearOperator as LinearOperator
from constrainx.linalg import Reason as Reason
from constrainx.linalg import Solver as Solver
from constrainx.linalg import lstsq as lstsq
from constrainx.runtime import Callback as Callback
from constrainx.runtime import CheckpointError as CheckpointError
from constrainx.runtime import Keep as Keep
from constrainx.step import Projection as Projection
from constrainx.step import Report as Report
from constrainx.step import constrain as constrain
from constrainx.step import contradictions as contradictions
from constrainx.step import nullspace as nullspace
from constrainx.step import project as project
from constrainx.step import reports as reports
from constrainx.trainers import Monitor as Monitor
from constrainx.trainers import NonFiniteError as NonFiniteError
from constrainx.trainers import Result as Result
from constrainx.trainers import Trainer as Trainer

__version__ = "0.1.0.dev0"
