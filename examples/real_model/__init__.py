"""Recipes, data, rewards and tables for a pretrained model. See docs/real_model.md."""
