"""The recipes as modules, `hf_ext.recipes.NAME`: of a clone, where they stand at its top level.

A wheel has the recipes themselves in this place, and not this file.
"""

from ..files import RECIPES, shipped_folder

__path__ = [str(shipped_folder(RECIPES))]
