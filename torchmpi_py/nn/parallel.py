"""Layers whose weights are split over the ranks of a communicator, for layers too large for one rank.

The P ranks of ``comm`` (default: the current level) give a layer the same input, and all get the same output; each
holds, and computes with, its part of the weight. Both passes are collective: every rank runs the same layers in one
order. What the ranks compute from the output is the same too, so that the loss is *one* loss, and the gradients are
those of the whole layer in one process; nothing has to be divided by P.

- Sizes need not divide by P: the first ranks hold one row or column more.
- Initial values are those of the whole layer with the same seed: each rank draws the whole weight, and keeps its part.
- ``state_dict()`` gives the whole weight, as the plain layer's does, on every rank, and is collective;
  ``load_state_dict`` takes it, and communicates nothing. So checkpoints do not depend on P. Where parameters stay on
  ranks (``keep_vars=True``, an optimizer's state), they are this rank's part.
- ``nn.synchronize_parameters``, the reductions of gradients, and the engine leave each part to the ranks that hold it,
  its replicas: with one group of ranks there are none, with several (data-parallel groups) one in each. Torch's
  DistributedDataParallel does not know of parts: give it a process group of the replicas.
- What runs between split layers has to be the same on every rank: dropout there needs the same seed.

What carries activations between whole and split: ``parts``. Source: Krizhevsky, One weird trick (2014); Shoeybi et al.,
Megatron-LM (2019); TorchMPI's model-parallel example.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear

from torchmpi_py.collectives import verbs
from torchmpi_py.collectives.check import check_all_with_allreduce
from torchmpi_py.core import communicators
from torchmpi_py.core.communicators import Communicator
from torchmpi_py.core.tensors import check_tensor
from torchmpi_py.nn.functional import own_communicator
from torchmpi_py.nn.parts import check_indices, join_parts, own_part, scale_gradient, sum_of_parts, to_parts
from torchmpi_py.nn.split_parameters import Split, mark


class SplitLayer(torch.nn.Module):
    """A layer with split parameters, whose ``state_dict`` is that of the plain layer. Making it is collective.

    comm: the ranks that hold the parts.
    """

    def __init__(self, comm: Communicator | None) -> None:
        super().__init__()
        self.comm = communicators.resolve(comm)
        self._layers_comm = own_communicator(self.comm)  # gradients use comm during the backward pass
        self._splits: dict[str, Split] = {}

    def _take_part(self, name: str, whole: Tensor | None, dim: int) -> None:
        """Make this rank's part of ``whole`` a parameter; None for None."""
        if whole is None:
            self.register_parameter(name, None)
            return
        split = Split.even(self.comm, dim, whole.shape[dim])
        part = torch.nn.Parameter(split.part_of(whole.detach()).clone(), whole.requires_grad)
        mark(part, split)
        self._splits[name] = split
        self.register_parameter(name, part)

    def _activations(self, name: str, dim: int) -> Split:
        """The split of activations along ``dim`` that goes with the split of a parameter."""
        return Split(self._layers_comm, dim, self._splits[name].sizes)

    def _whole(self, name: str) -> Tensor:
        """A parameter of the plain layer. Collective where it is split."""
        parameter = getattr(self, name).detach()
        return self._splits[name].whole_of(parameter) if name in self._splits else parameter

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._mark()

    def _mark(self) -> None:
        """Say of the parameters how they are split: copies do not know."""
        for name, split in self._splits.items():
            mark(getattr(self, name), split)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if not keep_vars:
            destination.update({prefix + name: self._whole(name) for name in self._splits})

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, local_metadata: Any, strict: bool, *lists: Any
    ) -> None:
        parts, error_messages = dict(state_dict), lists[-1]
        for name, split in self._splits.items():
            whole, part = state_dict.get(prefix + name), getattr(self, name)
            if whole is None:
                continue
            shape = split.whole_shape(part)
            if whole.shape != shape:
                error_messages.append(
                    f"{prefix}{name} has shape {tuple(whole.shape)}, but the whole parameter, of which this rank holds "
                    f"a part, has {tuple(shape)}: give the state of the plain layer, as state_dict() of this one does"
                )
                del parts[prefix + name]
                strict = False  # not missing
                continue
            parts[prefix + name] = split.part_of(whole).clone()
        super()._load_from_state_dict(parts, prefix, local_metadata, strict, *lists)
        self._mark()  # load_state_dict(assign=True) makes other parameters


class _SplitLinear(SplitLayer):
    """A linear layer with a split weight. ``_dim``: the dimension of the weight that is split."""

    _dim: int
    weight: torch.nn.Parameter
    bias: torch.nn.Parameter | None

    def __init__(
        self, in_features: int, out_features: int, bias: bool, comm: Communicator | None, plain: torch.nn.Linear | None
    ) -> None:
        super().__init__(comm)
        self.in_features = in_features
        self.out_features = out_features
        whole = torch.nn.Linear(in_features, out_features, bias) if plain is None else plain
        self._take_part("weight", whole.weight, self._dim)
        self._take_bias(whole.bias)

    def _take_bias(self, bias: torch.nn.Parameter | None) -> None:
        raise NotImplementedError

    def to_linear(self) -> torch.nn.Linear:
        """The plain layer, with the whole weight, on every rank. Collective."""
        weight = self._whole("weight")
        plain = torch.nn.Linear(1, 1, self.bias is not None, weight.device, weight.dtype)
        plain.in_features, plain.out_features = self.in_features, self.out_features
        plain.weight = torch.nn.Parameter(weight, self.weight.requires_grad)
        if self.bias is not None:
            plain.bias = torch.nn.Parameter(self._whole("bias").clone(), self.bias.requires_grad)
        return plain.train(self.training)

    def extra_repr(self) -> str:
        """The sizes, and how many parts there are."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"part {self.comm.rank} of {self.comm.size}"
        )


class ColumnParallelLinear(_SplitLinear):
    """A linear layer y = x A^T + b whose outputs are split: each rank has some rows of ``weight`` A, and of ``bias``.

    x: (..., in_features), the same on every rank. Result: (..., out_features), the same on every rank; with
    ``gather_output=False`` this rank's part of it, as ``RowParallelLinear(input_is_split=True)`` takes it. Between the
    two may be what works element by element. Backward sums the gradients of x over the ranks. Making the layer and
    ``gather_output`` are collective. ValueError for an input of another size, as from nn.Linear.
    """

    _dim = 0

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        comm: Communicator | None = None,
        gather_output: bool = True,
        _plain: torch.nn.Linear | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, comm, _plain)
        self.gather_output = gather_output

    @classmethod
    def from_linear(
        cls, linear: torch.nn.Linear, *, comm: Communicator | None = None, gather_output: bool = True
    ) -> ColumnParallelLinear:
        """A layer with the values of a plain one, the same on every rank (RanksDisagree if not). Collective."""
        _check_plain(linear, comm)
        return cls(
            linear.in_features, linear.out_features, linear.bias is not None, comm=comm, gather_output=gather_output,
            _plain=linear,
        )  # fmt: skip

    def _take_bias(self, bias: torch.nn.Parameter | None) -> None:
        self._take_part("bias", bias, 0)

    def forward(self, x: Tensor) -> Tensor:
        """``linear`` of the whole layer; see the class."""
        _check_features(self, x, self.in_features, "in_features")
        y = linear(to_parts(x, self._layers_comm), self.weight, self.bias)
        return join_parts(y, self._activations("weight", -1)) if self.gather_output else y


class RowParallelLinear(_SplitLinear):
    """A linear layer y = x A^T + b whose inputs are split: each rank has some columns of ``weight`` A, and all of b.

    x: (..., in_features), the same on every rank; with ``input_is_split`` this rank's part of it, as
    ``ColumnParallelLinear(gather_output=False)`` gives it. Result: (..., out_features), the same on every rank: the sum
    of what each rank computes. Making the layer and its forward pass are collective. ValueError for an input of another
    size.
    """

    _dim = 1

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        comm: Communicator | None = None,
        input_is_split: bool = False,
        _plain: torch.nn.Linear | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, comm, _plain)
        self.input_is_split = input_is_split

    @classmethod
    def from_linear(
        cls, linear: torch.nn.Linear, *, comm: Communicator | None = None, input_is_split: bool = False
    ) -> RowParallelLinear:
        """A layer with the values of a plain one, the same on every rank (RanksDisagree if not). Collective."""
        _check_plain(linear, comm)
        return cls(
            linear.in_features, linear.out_features, linear.bias is not None, comm=comm, input_is_split=input_is_split,
            _plain=linear,
        )  # fmt: skip

    def _take_bias(self, bias: torch.nn.Parameter | None) -> None:
        """Make a copy of the bias a parameter of every rank, with the values of the first."""
        if bias is not None:
            whole = verbs.broadcast(bias.detach().clone(), comm=self.comm)
            bias = torch.nn.Parameter(whole, bias.requires_grad)
        self.register_parameter("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        """``linear`` of the whole layer; see the class."""
        split = self._activations("weight", -1)
        if self.input_is_split:
            _check_features(self, x, split.size, "this rank's part of in_features")
        else:
            _check_features(self, x, self.in_features, "in_features")
            x = own_part(x, split)
        y = sum_of_parts(linear(x, self.weight), self._layers_comm)
        return y if self.bias is None else y + self.bias


class ParallelEmbedding(SplitLayer):
    """An embedding whose table is split: each rank has some of its rows. Making it and its forward pass are collective.

    x: indices of any shape, the same on every rank. Result: (*x.shape, embedding_dim), the same on every rank: the sum
    of the rows that each rank has, and of zeros. IndexError for an index outside the whole table, as from nn.Embedding.
    """

    weight: torch.nn.Parameter

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        comm: Communicator | None = None,
        _plain: torch.nn.Embedding | None = None,
    ) -> None:
        super().__init__(comm)
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        whole = torch.nn.Embedding(num_embeddings, embedding_dim) if _plain is None else _plain
        self._take_part("weight", whole.weight, 0)

    @classmethod
    def from_embedding(cls, table: torch.nn.Embedding, *, comm: Communicator | None = None) -> ParallelEmbedding:
        """A layer with the values of a plain one, which is the same on every rank (RanksDisagree if not). Collective.

        ValueError for the options that it has not: padding_idx, max_norm, scale_grad_by_freq, sparse.
        """
        if table.padding_idx is not None or table.max_norm is not None or table.scale_grad_by_freq or table.sparse:
            raise ValueError(
                f"{table}: a ParallelEmbedding has no padding_idx, max_norm, scale_grad_by_freq or sparse; make the "
                "table without them"
            )
        _check_plain(table, comm)
        return cls(table.num_embeddings, table.embedding_dim, comm=comm, _plain=table)

    def to_embedding(self) -> torch.nn.Embedding:
        """The plain layer, with the whole table, on every rank. Collective."""
        weight = torch.nn.Parameter(self._whole("weight"), self.weight.requires_grad)
        plain = torch.nn.Embedding(self.num_embeddings, self.embedding_dim, _weight=weight.detach())
        plain.weight = weight
        return plain.train(self.training)

    def forward(self, x: Tensor) -> Tensor:
        """The rows of the whole table; see the class."""
        check_indices("ParallelEmbedding: index", x, self.num_embeddings)
        split = self._splits["weight"]
        is_here = (x >= split.begin) & (x < split.begin + split.size)
        rows = embedding(x[is_here] - split.begin, self.weight)
        y = rows.new_zeros((*x.shape, self.embedding_dim)).masked_scatter(is_here.unsqueeze(-1), rows)
        return sum_of_parts(y, self._layers_comm)

    def extra_repr(self) -> str:
        """The sizes, and how many parts there are."""
        return f"{self.num_embeddings}, {self.embedding_dim}, part {self.comm.rank} of {self.comm.size}"


class ModelParallel(torch.nn.Sequential):
    """The model-parallel part of a data-parallel network: its layers compute with the batches of all ``comm``'s ranks.

    Below it (convolutions, say) each rank has its own batch; the layers in it are split over the same ``comm``, of few
    ranks. Forward gathers the k ranks' activations x, (rows, ...), runs the layers on all of them, and gives each rank
    its own rows of the result; rows may differ between ranks. Backward returns to each rank the gradients of its
    activations. Gradients inside are the *mean* over the k ranks' losses, so that averaging all gradients over all
    ranks (``synchronize_gradients``, ``register_async_backward``, the engine) gives those of the mean of all losses:
    the user's loop stays that of data-parallel training, but for ``nn.clip_grad_norm_`` in place of torch's. Both
    passes are collective over ``comm``. Parameters have the names that they have in a Sequential of the plain layers.

    The layers treat samples one by one: BatchNorm inside would see k batches.
    Source: Krizhevsky, One weird trick (2014).
    """

    def __init__(self, *layers: torch.nn.Module, comm: Communicator | None = None) -> None:
        super().__init__(*layers)
        self.comm = communicators.resolve(comm)
        self._layers_comm = own_communicator(self.comm)

    def forward(self, x: Tensor) -> Tensor:
        """The layers' result for this rank's rows; see the class."""
        counts: list[int] = verbs.allgather(x.shape[0], comm=self._layers_comm)
        split = Split(self._layers_comm, 0, tuple(counts))
        y: Tensor = super().forward(scale_gradient(join_parts(x, split), self.comm.size))  # type: ignore[no-untyped-call]
        return own_part(scale_gradient(y, 1 / self.comm.size), split)


def _check_plain(layer: torch.nn.Module, comm: Communicator | None) -> None:
    """RanksDisagree, on every rank, unless a plain layer is the same on all."""
    check_all_with_allreduce(dict(layer.named_parameters()), comm=comm)


def _check_features(layer: torch.nn.Module, x: Tensor, size: int, what: str) -> None:
    check_tensor(type(layer).__name__, "x", x)
    if x.dim() == 0 or x.shape[-1] != size:
        raise ValueError(
            f"{type(layer).__name__}: x has shape {tuple(x.shape)}; its last dimension is to be {size}, {what}"
        )
