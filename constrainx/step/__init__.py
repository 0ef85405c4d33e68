"""The null-space step, the methods to compare it with, and the protocol that they share."""

from constrainx.step._jacobian import pull_rows as pull_rows
from constrainx.step._lagrangian import Lagrangian as Lagrangian
from constrainx.step._linearise import SolverChoice as SolverChoice
from constrainx.step._linearise import Traced as Traced
from constrainx.step._linearise import describe_route as describe_route
from constrainx.step._linearise import explain_route as explain_route
from constrainx.step._linearise import trace_members as trace_members
from constrainx.step._method import Method as Method
from constrainx.step._method import Optimize as Optimize
from constrainx.step._method import Point as Point
from constrainx.step._method import Taken as Taken
from constrainx.step._method import report_rows as report_rows
from constrainx.step._null_space import NullSpace as NullSpace
from constrainx.step._optax import MethodName as MethodName
from constrainx.step._optax import as_method as as_method
from constrainx.step._optax import constrain as constrain
from constrainx.step._optax import nullspace as nullspace
from constrainx.step._penalty import Penalty as Penalty
from constrainx.step._project import Projection as Projection
from constrainx.step._project import project as project
from constrainx.step._report import ConstrainedState as ConstrainedState
from constrainx.step._report import ConstraintState as ConstraintState
from constrainx.step._report import Report as Report
from constrainx.step._report import contradictions as contradictions
from constrainx.step._report import reports as reports
from constrainx.step._unconstrained import Unconstrained as Unconstrained
