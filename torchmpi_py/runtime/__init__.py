"""Start and stop, where this rank is, exit, going on after a death."""
