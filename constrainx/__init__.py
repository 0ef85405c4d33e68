"""Train neural networks that must obey constraints."""

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

__version__ = "0.1.0.dev0"
