"""Start and stop, the placement of the rank on its node, exit, and recovery from the death of a rank."""
