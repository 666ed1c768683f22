"""The BFCL suite. It scores single-turn categories, and reads bfcl-eval's scores of the others."""
