"""SMOPD's operations inside other trainers, each of which is imported only by its own file."""
