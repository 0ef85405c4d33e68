"""One file for each experiment, the base class that they share, and their comparison."""

from constrainx.recipes._build import build_trainer as build_trainer
from constrainx.recipes._certificate import record_certificate as record_certificate
from constrainx.recipes._comparison import Comparison as Comparison
from constrainx.recipes._comparison import ComparisonError as ComparisonError
from constrainx.recipes._continue import read_recipe as read_recipe
from constrainx.recipes._find import all_recipes as all_recipes
from constrainx.recipes._find import describe as describe
from constrainx.recipes._find import find as find
from constrainx.recipes._find import read_starter as read_starter
from constrainx.recipes._recipe import OVERSIGHT as OVERSIGHT
from constrainx.recipes._recipe import PLACE as PLACE
from constrainx.recipes._recipe import Recipe as Recipe
from constrainx.recipes._recipe import Size as Size
from constrainx.recipes._recipe import steps_of as steps_of
from constrainx.recipes._recipe import weigh_method as weigh_method
from constrainx.recipes._resolve import CHOICES as CHOICES
from constrainx.recipes._resolve import SIZES as SIZES
from constrainx.recipes._resolve import RecipeError as RecipeError
from constrainx.recipes._result import was_asked_to_stop as was_asked_to_stop
from constrainx.recipes._result import write_result as write_result
from constrainx.recipes._soak import Endured as Endured
from constrainx.recipes._soak import SoakError as SoakError
from constrainx.recipes._soak import soak as soak
from constrainx.recipes._tables import Results as Results
