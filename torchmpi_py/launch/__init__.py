"""torchmpirun: start one process per GPU, or per core, through the MPI of this environment.

This folder uses only the standard library.
"""
