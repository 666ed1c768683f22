"""The paper's comparisons in small: `python -m bench.study` runs them over seeds and writes docs/study.md."""
