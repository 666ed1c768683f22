"""BFCL: single-turn categories scored by answers, multi-turn by the package bfcl-eval."""
