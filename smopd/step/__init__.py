"""Parts of a step (batch, sampling, rewards, teachers), and evaluation on held-out prompts."""
