"""The parts of one step: the batch and its sampling, rewards, teachers; and held-out prompts."""
