"""On one data rank FSDP only copies: parameters stay plain unless they must be cast."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims

from mula_titan.model import model_registry
from mula_titan.model.parallelize import parallelize_mula


@pytest.fixture
def ranks(request):
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=request.param)
    yield request.param
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("ranks", "dtype", "param_dtype", "is_sharded"),
    [
        (1, "float32", "float32", False),
        (1, "bfloat16", "bfloat16", False),
        (1, "float32", "bfloat16", True),
        (2, "float32", "float32", True),
    ],
    indirect=["ranks"],
)
def test_fsdp_only_where_it_shards_or_casts(ranks, dtype, param_dtype, is_sharded):
    parallelism = ParallelismConfig(spmd_backend="partial_dtensor")
    with torch.device("meta"):
        model = model_registry("mula_debug").model.build()
    model = parallelize_mula(
        model,
        parallel_dims=ParallelDims.from_config(parallelism, ranks),
        training=TrainingConfig(dtype=dtype, mixed_precision_param=param_dtype),
        parallelism=parallelism,
        compile_config=CompileConfig(enable=False),
        ac_config=None,
        dump_folder="",
    )
    assert [isinstance(block, FSDPModule) for block in model.layers.values()] == [is_sharded] * 4
    assert isinstance(model, FSDPModule) == is_sharded
