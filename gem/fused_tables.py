"""Embedding tables on FBGEMM's fused kernels, put on from outside: one lookup kernel for all tables of a collection,
and row-wise Adagrad inside the backward kernel, so that a gradient of a table never exists.

TorchRec's own fused collections use the same kernels; its unpooled one reads every feature's length back from the
device in every step and refuses a CPU, so the kernel is driven directly here. Names of parameters are those of the
collections that are replaced, so state_dict and table_parameters() stay as they are. Mathematics: as RowWiseAdagrad
in gem/optim.py, exact, duplicates of a row summed before its update.
"""

from __future__ import annotations

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
    BoundsCheckMode,
    ComputeDevice,
    EmbeddingLocation,
    PoolingMode,
)
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from torch import nn
from torchrec.modules.embedding_configs import PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from gem.config import Config
from gem.model import GEM

TABLE_EPS = 1e-8
_POOLING = {PoolingType.SUM: PoolingMode.SUM, PoolingType.MEAN: PoolingMode.MEAN}


class _FiniteGradient(torch.autograd.Function):
    """The identity; in the backward NaN and infinite elements become 0, so that a bad step cannot spoil a table."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return torch.nan_to_num(grad, nan=0.0, posinf=0.0, neginf=0.0)


def _kernel(tables: list, pooling: PoolingMode, weights: list, rate: float) -> SplitTableBatchedEmbeddingBagsCodegen:
    """The fused module of tables [rows, dim], holding a copy of `weights`; features in the order of the tables."""
    device = weights[0].device
    on_gpu = device.type == "cuda"
    place = (EmbeddingLocation.DEVICE, ComputeDevice.CUDA) if on_gpu else (EmbeddingLocation.HOST, ComputeDevice.CPU)
    kernel = SplitTableBatchedEmbeddingBagsCodegen(
        [(table.num_embeddings, table.embedding_dim, *place) for table in tables],
        feature_table_map=[index for index, table in enumerate(tables) for _ in table.feature_names],
        pooling_mode=pooling,
        optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        learning_rate=rate,
        eps=TABLE_EPS,
        stochastic_rounding=False,
        bounds_check_mode=BoundsCheckMode.NONE,  # ids were checked when the split was read
        device=device,
    )
    for own, given in zip(kernel.split_embedding_weights(), weights, strict=True):
        own.data.copy_(given)
    return kernel


class _Fused(nn.Module):
    """What both collections share: kernels outside the module tree, their weights inside it by table name."""

    folder = ""  # name of the ModuleDict of tables in TorchRec's collection

    def __init__(self, tables: list, groups: list[tuple[PoolingMode, list]], plain: nn.Module, rate: float):
        super().__init__()
        weights = {table.name: getattr(plain, self.folder)[table.name].weight.detach() for table in tables}
        self._kernels = [
            (own, _kernel(own, pooling, [weights[table.name] for table in own], rate)) for pooling, own in groups
        ]
        self._sums: dict[str, torch.Tensor] = {}
        held = nn.ModuleDict()
        for own, kernel in self._kernels:
            parts = zip(own, kernel.split_embedding_weights(), kernel.split_optimizer_states(), strict=True)
            for table, weight, states in parts:
                held[table.name] = nn.Module()
                held[table.name].register_parameter("weight", nn.Parameter(weight))
                self._sums[f"{self.folder}.{table.name}.weight"] = states[0]
        setattr(self, self.folder, held)

    def sums(self) -> dict[str, torch.Tensor]:
        """Row-wise Adagrad's sums of squares, float32 [rows]: name of the table's parameter in this module -> state."""
        return self._sums

    def _apply(self, fn, recurse=True):
        raise NotImplementedError("fused tables stay on the device where they were made; move the model first")


class FusedBags(_Fused):
    """In place of an EmbeddingBagCollection: KJT -> KeyedTensor of pooled embeddings, float32 [B, sum of dims]."""

    folder = "embedding_bags"

    def __init__(self, plain: EmbeddingBagCollection, rate: float):
        tables = plain.embedding_bag_configs()
        groups: dict[PoolingMode, list] = {}
        for table in tables:
            groups.setdefault(_POOLING[table.pooling], []).append(table)
        super().__init__(tables, list(groups.items()), plain, rate)
        self.names = [name for table in tables for name in table.feature_names]
        self.dims = [table.embedding_dim for table in tables for _ in table.feature_names]

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        parts = {}
        for tables, kernel in self._kernels:
            names = [name for table in tables for name in table.feature_names]
            own = features if names == features.keys() else features.permute([features.keys().index(n) for n in names])
            pooled = _FiniteGradient.apply(kernel(own.values(), own.offsets()))
            dims = [table.embedding_dim for table in tables for _ in table.feature_names]
            parts |= dict(zip(names, pooled.split(dims, 1), strict=True))
            if names == self.names:  # one kind of pooling: the kernel's own layout
                return KeyedTensor(self.names, self.dims, pooled)
        return KeyedTensor(self.names, self.dims, torch.cat([parts[name] for name in self.names], 1))


class FusedRows(_Fused):
    """In place of an EmbeddingCollection: KJT -> feature -> JaggedTensor of float32 [T, dim], nothing pooled.

    The KJT holds the features table by table, as dataset.Schema.history_tables has them.
    """

    folder = "embeddings"

    def __init__(self, plain: EmbeddingCollection, rate: float):
        tables = plain.embedding_configs()
        super().__init__(tables, [(PoolingMode.NONE, tables)], plain, rate)
        self.names = [name for table in tables for name in table.feature_names]

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        if features.keys() != self.names:
            raise ValueError(f"fused tables: features {features.keys()}; allowed: {self.names}, in this order")
        _, kernel = self._kernels[0]
        rows = _FiniteGradient.apply(kernel(features.values(), features.offsets()))
        lengths = features.lengths().view(len(self.names), -1)
        split = rows.split(features.length_per_key())  # known on the host, see dataset.checked_kjt
        return {n: JaggedTensor(part, lengths=own) for n, part, own in zip(self.names, split, lengths, strict=True)}


def apply(model: GEM, config: Config) -> GEM:
    """Replace the model's TorchRec collections by fused ones with the same weights; to be called on the final device.

    From then on a backward pass updates the tables at config.train.table_lr; gem.optim.Optimizers leaves them alone.
    """
    rate = config.train.table_lr
    model.features.tables = FusedBags(model.features.tables, rate)
    if model.history is not None:
        model.history.tables = FusedRows(model.history.tables, rate)
    return model


def sums(model: nn.Module) -> dict[str, torch.Tensor]:
    """Optimiser states of all fused tables of a model: parameter name -> float32 [rows]; empty without any."""
    return {
        f"{name}.{key}": state
        for name, module in model.named_modules()
        if isinstance(module, _Fused)
        for key, state in module.sums().items()
    }
