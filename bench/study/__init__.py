"""Small versions of the paper's comparisons. `python -m bench.study` runs them over several seeds."""
