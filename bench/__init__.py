"""Benchmarks of the operations, and their command `python -m bench`."""
