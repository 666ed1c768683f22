"""The evaluation suites that `smopd evaluate SUITE` runs."""
