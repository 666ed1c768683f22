"""A pretrained model through the whole method: recipes, data, rewards, tables; see docs/real_model.md."""
