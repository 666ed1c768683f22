"""Shared code of the benchmarks: inputs, float64 truth, providers, ceilings, timing, rows."""
