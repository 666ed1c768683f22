"""Time limits of tests, long enough for slow machines."""

HANG_SECONDS = 3600.0
"""For a process that may hang."""

MISSED_SECONDS = 6.0
"""A limit that only a hanging call exceeds."""
