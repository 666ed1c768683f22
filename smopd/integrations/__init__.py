"""SMOPD's operations inside other trainers, one file a host. A host is imported only by its own file."""
