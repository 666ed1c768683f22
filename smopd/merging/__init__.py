"""Models merged by their weights: sums of task vectors, and the guard that chooses one by rollouts."""
