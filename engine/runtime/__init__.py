"""The model as it runs."""

from engine.runtime.later_modules import import_later
from engine.runtime.lean_import import import_lean

import_later()  # before anything here imports torch,
import_lean()  # or transformers
