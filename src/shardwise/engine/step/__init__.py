"""One step: its exchange of figures, forwards and backwards, and the close, in which ranks decide alike."""
