"""Merges of model weights: sums of task vectors, and the guard that chooses a sum by rollouts."""
