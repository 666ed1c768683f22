"""Settings, recipes and their YAML, checks, and the command line."""
