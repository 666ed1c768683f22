"""Rewards: functions by import path that score completions; `isolation` runs them in killable workers."""
