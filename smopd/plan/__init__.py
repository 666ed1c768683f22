"""`python -m smopd.plan RECIPE`: whether a recipe fits the GPUs, before anything is bought or waited for."""
