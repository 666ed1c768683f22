"""Whole examples of use, run from a clone."""
