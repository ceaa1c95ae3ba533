"""The model as it runs."""

from engine.runtime.lean_import import import_lean

import_lean()  # before anything here imports transformers
