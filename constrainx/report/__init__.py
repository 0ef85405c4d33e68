"""Turns the folders that training runs leave behind into plots, a table and one HTML page."""

from constrainx.report._front import Point as Point
from constrainx.report._front import draw_front as draw_front
from constrainx.report._front import draw_over_time as draw_over_time
from constrainx.report._page import write as write
from constrainx.report._runs import ReportError as ReportError
from constrainx.report._runs import Run as Run
from constrainx.report._runs import load as load
