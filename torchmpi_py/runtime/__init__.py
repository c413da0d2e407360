"""Start and stop, the place of this rank, exit, and recovery from the death of a rank."""
