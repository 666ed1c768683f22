"""One recipe from its settings to its results: base model, warm start, runs in order, folder, processes."""
