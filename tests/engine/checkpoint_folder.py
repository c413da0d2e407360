"""What lies in a folder of checkpoints."""

import os


def listed(folder):
    """The names in it, without that of its lock file."""
    return [name for name in os.listdir(folder) if name != ".lock"]
