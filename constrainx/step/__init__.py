"""The null-space step, its rivals, and both as Optax transformations."""

from constrainx.step._optax import constrain as constrain
from constrainx.step._optax import nullspace as nullspace
from constrainx.step._project import Projection as Projection
from constrainx.step._project import project as project
from constrainx.step._report import Report as Report
from constrainx.step._report import contradictions as contradictions
from constrainx.step._report import reports as reports
