"""The paper's comparisons in small: `python -m smopd.study` runs them over seeds and writes docs/study.md."""
