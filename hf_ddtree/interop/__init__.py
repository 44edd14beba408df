"""All that touches private or version-dependent parts of Transformers."""
