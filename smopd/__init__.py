"""SMOPD: multi-reward post-training by specialised teachers and online policy distillation."""

__version__ = "0.1.0"
