"""A pretrained model through the whole method: the tables of docs/real_model.md, and what a step costs."""
