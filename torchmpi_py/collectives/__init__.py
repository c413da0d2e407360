"""The collectives, and the flavours that carry them out."""
