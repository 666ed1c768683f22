"""Evaluation suites; `python -m smopd.evaluate SUITE` is their command."""
