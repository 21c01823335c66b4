"""The weights of one embedding kernel, split again over the ranks that hold the same shard (generation V3)."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn


class ReplicaShards:
    """Between uses a rank keeps 1/n of the kernel's weights; `n` ranks of `group` hold equal copies otherwise.

    The kernel's own tensor stays where it is and only its storage comes and goes, so that autograd's saved tensors and
    TorchRec's views stay valid. Hooks gather before a lookup and before its backward pass and free after the lookup;
    `scatter`, once the backward pass has updated the copy, averages over the replicas and frees it.
    """

    def __init__(self, kernel: nn.Module, group: dist.ProcessGroup):
        emb = kernel.emb_module
        self.weights = (emb.weights_host if emb.weights_host.numel() else emb.weights_dev).detach()
        self.group, self.replicas = group, dist.get_world_size(group)
        self.size = -(-self.weights.numel() // self.replicas)
        self.storage = self.weights.untyped_storage()
        self.bytes_full = self.size * self.replicas * self.weights.element_size()
        self.storage.resize_(self.bytes_full)  # the last part is as long as the others
        self.part = self.weights.new_empty(self.size)
        self.is_whole = True
        self.keep()
        self.release()
        kernel.register_forward_pre_hook(lambda *_: self.gather())
        kernel.register_forward_hook(lambda *_: self.release())
        kernel.register_full_backward_pre_hook(lambda *_: self.gather())

    @property
    def bytes_held(self) -> int:
        """Bytes of weights on this rank now."""
        return self.part.nbytes + self.storage.nbytes()

    @property
    def bytes_peak(self) -> int:
        """Bytes of weights while a lookup or an update runs: the shard and this rank's part of it."""
        return self.part.nbytes + self.bytes_full

    def _all(self) -> torch.Tensor:
        # a tensor of its own over the same storage: writing it does not count as a change of what autograd saved
        return torch.empty(0, dtype=self.weights.dtype, device=self.weights.device).set_(
            self.storage, 0, (self.size * self.replicas,)
        )

    @torch.no_grad()
    def gather(self) -> None:
        """Whole weights on every rank. Collective; does nothing when they are there."""
        if not self.is_whole:
            self.storage.resize_(self.bytes_full)
            dist.all_gather_into_tensor(self._all(), self.part, group=self.group)
            self.is_whole = True

    def release(self) -> None:
        """Free the copy; changes of it are lost."""
        self.storage.resize_(0)
        self.is_whole = False

    @torch.no_grad()
    def keep(self) -> None:
        """Take this rank's part from the whole copy, which must be equal on all replicas."""
        rank = dist.get_rank(self.group)
        self.part.copy_(self._all()[rank * self.size : (rank + 1) * self.size])

    @torch.no_grad()
    def scatter(self) -> None:
        """Average the replicas' updated copies into their parts, and free the copies. Collective.

        Does nothing where no backward pass has run since the last lookup, so every rank runs one, also on an empty
        batch.
        """
        if not self.is_whole:
            return
        if self.part.is_cuda:
            dist.reduce_scatter_tensor(self.part, self._all(), dist.ReduceOp.AVG, group=self.group)
        else:
            dist.reduce_scatter_tensor(self.part, self._all(), group=self.group)
            self.part.div_(self.replicas)
        self.release()
