"""The implementations of the collectives, one file each, and what only they use."""
