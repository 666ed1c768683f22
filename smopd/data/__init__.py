"""Data: where it lies, how it is fetched, and rows of prompts made of it."""
