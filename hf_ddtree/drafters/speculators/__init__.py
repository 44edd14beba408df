"""Checkpoints of the speculators library."""
