"""The ways to carry a verb out, one file each, and what only they use."""
