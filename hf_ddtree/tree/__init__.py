"""Token trees: what they are, and how they are built from distributions. Knows no model."""
