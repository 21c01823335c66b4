"""Dense parallelism over NCCL: one rank on one GPU, two ranks on two, against one process on the same GPU."""

import pytest
import torch

from gem.parallel import launch
from tests.gem import tiny
from tests.parallel import dense_checks as checks
from tests.parallel.test_dense import is_exact

pytestmark = pytest.mark.gpu
LOW = ("float8", "mx")


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.timeout(300)
def test_meshes_follow_one_gpu(tmp_path, ranks):
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs, {torch.cuda.device_count()} are visible")
    folder = tiny.dataset(tmp_path / "data", rows=68)
    for found in launch.spawn(ranks, checks.on_gpus, "nccl", arguments=(folder,), timeout_s=240):
        for name, result in found.items():
            if name in LOW:
                assert 1e-7 < result["loss"][0] < 2e-3, name
            else:
                is_exact(result)
