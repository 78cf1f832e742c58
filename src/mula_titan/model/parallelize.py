"""Apply parallelism to the model: CP -> TP/EP -> activation checkpointing -> block compile -> FSDP2 or replication.

One data rank needs neither, as long as parameters aren't cast for the computation.
"""

from torchtitan.config import TORCH_DTYPE_MAP, CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointingConfig
from torchtitan.distributed.compile import apply_compile
from torchtitan.distributed.context_parallel import apply_cp_to_forward
from torchtitan.distributed.fsdp import apply_fsdp_to_decoder

from mula_titan.components.optimizer import replicate_parameters
from mula_titan.model.model import MulaModel
from mula_titan.runtime.comm import use_plain_sums


def parallelize_mula(
    model: MulaModel,
    *,
    parallel_dims: ParallelDims,
    training: TrainingConfig,
    parallelism: ParallelismConfig,
    compile_config: CompileConfig,
    ac_config: ActivationCheckpointingConfig,
    dump_folder: str,
) -> MulaModel:
    """Shard a model, or one pipeline stage of it, that lies on the meta device.

    Returns:
        The same model, transformed in place.

    Raises:
        ValueError: another SPMD backend than partial_dtensor is configured.
    """
    if parallelism.spmd_backend != "partial_dtensor":
        raise ValueError(
            f"parallelism.spmd_backend = {parallelism.spmd_backend!r}: Mula models need 'partial_dtensor' "
            "(spmd_types fails with expert parallelism on gloo)."
        )
    if parallel_dims.cp_enabled:
        # Before parallelize(), so that it runs inside attention's local region.
        inner = [block.attention.inner_attention for block in model.layers.values()]
        apply_cp_to_forward(inner, parallel_dims.get_mesh("cp"))
    if parallel_dims.tp_enabled or parallel_dims.ep_enabled:
        model.parallelize(parallel_dims)
    if ac_config is not None:
        ac_config.build(dump_folder=dump_folder).apply(model)
    if compile_config.enable and "model" in compile_config.components:
        apply_compile(model, compile_config=compile_config, parallel_dims=parallel_dims)

    model.data_mesh = parallel_dims.get_optional_mesh("loss")
    param_dtype, sharding = TORCH_DTYPE_MAP[training.mixed_precision_param], model.config.optimizer_sharding
    if sharding != "fsdp":
        replicate_parameters(model, parallel_dims, sharding=sharding, param_dtype=param_dtype)
        return model
    replicate = ["dp_replicate"] if parallel_dims.dp_replicate_enabled else []
    mesh = parallel_dims.get_mesh([*replicate, "fsdp"])
    is_cast = training.dtype != training.mixed_precision_param
    if mesh.size() == 1 and not (is_cast or parallel_dims.ep_enabled or training.enable_cpu_offload):
        return model  # FSDP would copy every parameter twice and every gradient three times a step, for nothing
    apply_fsdp_to_decoder(
        model,
        mesh,
        param_dtype=param_dtype,
        reduce_dtype=TORCH_DTYPE_MAP[training.mixed_precision_reduce],
        pp_enabled=parallel_dims.pp_enabled,
        cpu_offload=training.enable_cpu_offload,
        reshard_after_forward_policy=parallelism.fsdp_reshard_after_forward,
        ep_degree=parallel_dims.ep,
        edp_mesh=parallel_dims.get_optional_mesh([*replicate, "efsdp"]) if parallel_dims.ep_enabled else None,
        enable_symm_mem=parallelism.enable_fsdp_symm_mem,
    )
    use_plain_sums(model)
    return model
