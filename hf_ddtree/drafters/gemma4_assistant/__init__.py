"""The assistants that are published with Gemma 4, which attend to the target's own keys and values."""
