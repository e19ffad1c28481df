"""What plain programs do beside an engine: seen, and taken over or refused in words."""
