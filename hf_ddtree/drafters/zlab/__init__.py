"""Checkpoints in the layout that z-lab publishes."""
