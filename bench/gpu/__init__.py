"""Benchmarks of `make gpu`."""
