"""The flavours (implementations of the collectives), one file each, and the modules that only flavours use."""
