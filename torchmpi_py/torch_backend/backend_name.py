"""The name of the backend in torch.distributed. Every module of this room may import it."""

NAME = "torchmpi"
