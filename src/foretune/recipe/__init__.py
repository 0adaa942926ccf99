"""A fine-tune as a folder that a person can read and run: configuration, entry scripts, exact requirements, the plan.

The scripts call the installed package and hold no logic of their own; a recipe of another version is refused.
"""

from foretune.recipe.folder import Recipe, require_free, write_recipe
from foretune.recipe.version import RECIPE_FILE, require_same_version

__all__ = ["RECIPE_FILE", "Recipe", "require_free", "require_same_version", "write_recipe"]
