"""Least squares on pytrees, matrix-free and differentiable."""

from constrainx.linalg._cg import CG as CG
from constrainx.linalg._cholesky import Cholesky as Cholesky
from constrainx.linalg._info import Info as Info
from constrainx.linalg._info import Reason as Reason
from constrainx.linalg._lsmr import LSMR as LSMR
from constrainx.linalg._lstsq import lstsq as lstsq
from constrainx.linalg._operator import LinearOperator as LinearOperator
from constrainx.linalg._problem import LeastSquares as LeastSquares
from constrainx.linalg._problem import Solver as Solver
from constrainx.linalg._qr import QR as QR
from constrainx.linalg._vector import Vector as Vector
from constrainx.linalg._vector import dot as dot
from constrainx.linalg._vector import norm as norm
