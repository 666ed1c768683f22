"""SMOPD's operations for other trainers. Each trainer is imported only by its own file."""
