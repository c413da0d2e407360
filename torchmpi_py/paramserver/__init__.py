"""Parameter servers: tensors cut into shards over the ranks, with which each rank exchanges values when it likes.

After TorchMPI's parameter server (reference section 5). For now all ranks of a server are on one node.
"""

from torchmpi_py.paramserver.rules import register_rule
from torchmpi_py.paramserver.server import ParameterServer, free_all, init

__all__ = ["ParameterServer", "free_all", "init", "register_rule"]
