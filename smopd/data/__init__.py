"""Data: where it is, how it is fetched, and how rows of prompts are made from it."""
