"""The host's waits for a GPU, found on a CPU."""

import torch
from torch.overrides import TorchFunctionMode


class AsOnGpu(TorchFunctionMode):
    """Tensors say that they are on a GPU; `waits` has the calls for which the host would wait for one."""

    READS = (torch.Tensor.tolist, torch.Tensor.item, torch.Tensor.cpu, torch.equal)
    CASTS = (torch.Tensor.__bool__, torch.Tensor.__int__, torch.Tensor.__float__, torch.Tensor.__index__)
    COPIES = (torch.tensor, torch.as_tensor, torch.Tensor.new_tensor, torch.nonzero, torch.Tensor.nonzero)
    INDEXES = (torch.Tensor.__getitem__, torch.Tensor.__setitem__)

    def __init__(self):
        super().__init__()
        self.waits = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func == torch.Tensor.is_cuda.__get__:
            return True
        # A copy from memory that is not pinned, as of an index that is a list, ends before torch returns.
        moves = func is torch.Tensor.to and any(isinstance(one, torch.Tensor | torch.device) for one in args[1:])
        lists = func in self.INDEXES and isinstance(args[1], list)
        if func in (*self.READS, *self.CASTS, *self.COPIES) or moves or lists:
            self.waits.append(func.__name__)
        return func(*args, **(kwargs or {}))
