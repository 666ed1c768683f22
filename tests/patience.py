"""How long tests wait, so that none fails because a machine is slow."""

HANG_SECONDS = 3600.0
"""For a process: only one that hangs takes so long."""

MISSED_SECONDS = 6.0
"""A limit that a test means to be missed by what hangs, and by nothing else."""
