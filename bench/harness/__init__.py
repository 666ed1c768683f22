"""What the benchmarks share: inputs, float64 truth, providers, ceilings, times, rows."""
