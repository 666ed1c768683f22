"""Data sets: where they are stored, how they are fetched, and how their rows become prompts."""
