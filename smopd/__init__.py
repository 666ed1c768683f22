"""SMOPD: multi-reward post-training by specialised teachers and online policy distillation."""

__version__ = "0.2.0.dev0"
