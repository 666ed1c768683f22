"""Reward functions, which score completions. `pool` runs them in workers that can be killed."""
