"""The collective verbs, and the flavours that carry them out."""
