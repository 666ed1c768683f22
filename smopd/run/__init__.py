"""Execution of a recipe: base model, warm start, runs, and run directory."""
