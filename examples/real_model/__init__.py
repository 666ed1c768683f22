"""Recipes, data, rewards and tables for a pretrained model; see docs/real_model.md."""
