"""Execution of a recipe: base model, warm start, runs, run directory, local processes."""
