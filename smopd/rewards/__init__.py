"""Rewards: functions by import path that score completions; `pool` runs them in killable workers."""
