"""Worlds to train in: generated tool calls, SNIPS, messages with words to use; and small models."""
