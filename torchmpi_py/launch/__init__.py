"""Start one process per GPU (or core) through the MPI of this environment. Standard library only."""
