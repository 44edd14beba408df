"""How a token tree passes through a model's layers: masks for attention, operators for layers with a state."""
