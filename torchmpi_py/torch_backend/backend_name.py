"""The name of the backend in torch.distributed."""

NAME = "torchmpi"
