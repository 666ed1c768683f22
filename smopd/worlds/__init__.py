"""Environments to train in, and small models for them."""
