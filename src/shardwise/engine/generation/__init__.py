"""The model's own `generate`, under every plan."""
