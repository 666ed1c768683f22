"""Settings of a run: typed sections, recipes and their YAML, what may not be combined, the command line."""
