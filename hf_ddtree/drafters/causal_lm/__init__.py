"""Causal language models as drafters."""
