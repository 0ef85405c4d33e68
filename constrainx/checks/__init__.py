"""Checks of a model's constraints: how well they hold, and whether they can be met."""

from constrainx.checks._bounds import bound_mean as bound_mean
from constrainx.checks._bounds import bound_share as bound_share
from constrainx.checks._certify import Certificate as Certificate
from constrainx.checks._certify import Certified as Certified
from constrainx.checks._certify import certify as certify
from constrainx.checks._diagnose import diagnose as diagnose
from constrainx.checks._diagnose import diagnose_point as diagnose_point
from constrainx.checks._diagnosis import Diagnosed as Diagnosed
from constrainx.checks._diagnosis import Diagnosis as Diagnosis
from constrainx.checks._table import figure as figure
from constrainx.checks._table import lay_out as lay_out
from constrainx.checks._table import wrap as wrap
