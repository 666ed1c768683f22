"""Evaluation suites; `smopd evaluate SUITE` runs them."""
