"""What ``p.grad`` is while the gradient of a parameter is elsewhere: in a reduction, or on the rank that updates it.

In place of None or of half-reduced values ``p.grad`` is a tensor without memory. Its shape, dtype and device can be
read; whatever uses its values (clipping, norms, GradScaler, hooks, autograd that adds to it) raises RuntimeError. None
would let ``clip_grad_norm_`` skip the gradient silently, and a view of the bucket would let it change the values while
they travel. Setting ``p.grad`` to None drops it, as ``zero_grad()`` does.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch


class AbsentGradient(torch.Tensor):
    """Stands for the gradient of a parameter that is being reduced."""

    place = "in a reduction: call synchronize() of the registration after each backward(), and before clipping"

    @classmethod
    def why(cls) -> str:
        """Return what went wrong, with the remedies."""
        return (
            f"a gradient was read or changed that is {cls.place}. Or backward() ran again before synchronize() or "
            "step(): to accumulate, use frequency= or backward_passes_per_step=. Activation checkpointing needs "
            "checkpoint(..., use_reentrant=False). Register a hook that changes gradients before the registration or "
            "the optimizer is made. Keep a DistributedOptimizer, and remove() it before you train without it. After a "
            "backward() that raised, call zero_grad(set_to_none=True)"
        )

    @staticmethod
    def __new__(cls, parameter: torch.Tensor) -> AbsentGradient:
        """Make one of the parameter's shape, dtype and device."""
        return torch.Tensor._make_wrapper_subclass(cls, parameter.shape, dtype=parameter.dtype, device=parameter.device)

    @classmethod
    def __torch_dispatch__(cls, *_: Any, **__: Any) -> NoReturn:
        """Refuse all that torch computes, autograd's additions included."""
        raise RuntimeError(cls.why())

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse what does not go through torch's dispatcher."""
        raise RuntimeError(self.why())

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    __array__ = __dlpack__ = data_ptr = numpy = share_memory_ = tolist = _refuse
    data = property(_refuse, _refuse)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{type(self).__name__}(shape={tuple(self.shape)})"
