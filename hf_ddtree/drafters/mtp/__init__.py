"""A target's own multi-token-prediction layers as a drafter."""
