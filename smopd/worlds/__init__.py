"""A generated tool-calling world, and small models for it and for the Qwen vocabulary."""
