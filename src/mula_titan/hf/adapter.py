"""torchtitan's state-dict adapter for Mula models, for ``checkpoint.initial_load_in_hf`` and ``last_save_in_hf``.

Shape suffixes: E = experts, F = expert width, D = model width.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torchtitan.models.common.decoder import Decoder
from torchtitan.protocols.state_dict_adapter import StateDictAdapter

from mula_titan.hf.names import EMBEDDING, HEAD, hf_name, is_computed, is_expert_bias, native_name


@dataclass(frozen=True)
class _ExpertLayout:
    """How a tensor of all experts was distributed when :meth:`MulaStateDictAdapter.to_hf` split it."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size
    stride: tuple[int, ...]
    local_experts: range


class MulaStateDictAdapter(StateDictAdapter):
    """Renames tensors and splits or stacks experts, on plain tensors and on this rank's shards of DTensors.

    No communication, no copy on the way out. torchtitan's ``MoEStateDictAdapter`` isn't used: its helpers fail when
    experts are replicated over a mesh dimension (HSDP) or don't divide evenly over ranks (64 experts on 12 ranks).
    A state dict may hold a part of the model (a pipeline stage); completeness is checked per expert tensor here and for
    whole models by export and import.

    Args:
        model_config: configuration of the model.
        hf_assets_path: folder whose ``model.safetensors.index.json`` says how to split a saved checkpoint into files;
            None for a single file.
    """

    def __init__(self, model_config: Decoder.Config, hf_assets_path: str | None) -> None:
        has_index = hf_assets_path is not None and (Path(hf_assets_path) / "model.safetensors.index.json").is_file()
        # torchtitan warns about a folder without an index, which a tokenizer's folder is.
        super().__init__(model_config, hf_assets_path if has_index else None)
        self.hf_assets_path = hf_assets_path
        self._tied = model_config.enable_weight_tying
        if self._tied and self.fqn_to_index_mapping:
            self.fqn_to_index_mapping.pop(HEAD, None)
        self._expert_layouts: dict[str, _ExpertLayout] = {}

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Hugging Face state dict whose tensors share memory with the given ones; each rank gets its own experts.

        Raises:
            ValueError: a key without a Hugging Face name, or a balancing bias that isn't zero.
        """
        hf_state_dict: dict[str, Any] = {}
        unknown = []
        for native, value in state_dict.items():
            if is_expert_bias(native):
                check_expert_bias(native, value)
                continue
            if self._tied and native == HEAD:
                continue
            name = hf_name(native)
            if name is None:
                unknown.append(native)
            elif "{}" not in name:
                hf_state_dict[name] = value
            else:
                hf_state_dict |= {name.format(e): w for e, w in self._split_experts(native, value).items()}
        if unknown:
            raise ValueError(f"no Hugging Face name for {unknown}: is this the state dict of a Mula model?")
        return hf_state_dict

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        """Native state dict; experts are stacked into the layout that the last :meth:`to_hf` saw, else whole.

        Balancing biases are absent: a loaded model keeps its own.

        Raises:
            ValueError: an unknown name, or a layer that lacks some of its experts.
        """
        state_dict: dict[str, Any] = {}
        experts: dict[str, dict[int, torch.Tensor]] = {}
        unknown = []
        for name, value in hf_state_dict.items():
            found = native_name(name)
            if found is None:
                if not is_computed(name):
                    unknown.append(name)
            elif found[1] is None:
                state_dict[found[0]] = value
            else:
                experts.setdefault(found[0], {})[found[1]] = value
        if unknown:
            raise ValueError(f"unknown Hugging Face tensors {unknown}: is this an OLMo or OLMoE checkpoint?")
        for native, weights in experts.items():
            state_dict[native] = self._stack_experts(native, weights)
        if self._tied and EMBEDDING in state_dict:
            state_dict[HEAD] = state_dict[EMBEDDING]
        return state_dict

    def _split_experts(self, native: str, weights_EFD: torch.Tensor) -> dict[int, torch.Tensor]:
        """Weight ``(F, D)`` of each expert that has rows on this rank, as views of its local shard."""
        if not isinstance(weights_EFD, DTensor):
            self._expert_layouts.pop(native, None)
            return dict(enumerate(weights_EFD.unbind(0)))
        mesh, placements = weights_EFD.device_mesh, weights_EFD.placements
        local_shape, offsets = compute_local_shape_and_global_offset(weights_EFD.shape, mesh, placements)
        local_experts = range(offsets[0], offsets[0] + local_shape[0])
        self._expert_layouts[native] = _ExpertLayout(
            mesh, placements, weights_EFD.shape, weights_EFD.stride(), local_experts
        )
        # An expert lives on the mesh dimensions that don't split the experts.
        kept = [i for i, p in enumerate(placements) if not (isinstance(p, (Shard, _StridedShard)) and p.dim == 0)]
        local = dict(zip(local_experts, weights_EFD.to_local().unbind(0), strict=True))
        if not kept:
            return local
        assert mesh.mesh_dim_names is not None, "torchtitan names its mesh dimensions"
        sub_mesh = mesh[tuple(mesh.mesh_dim_names[i] for i in kept)]
        sub_placements = [_without_expert_dim(placements[i]) for i in kept]
        shape, stride = weights_EFD.shape[1:], weights_EFD.stride()[1:]
        return {
            expert: DTensor.from_local(w, sub_mesh, sub_placements, run_check=False, shape=shape, stride=stride)
            for expert, w in local.items()
        }

    def _stack_experts(self, native: str, weights: dict[int, torch.Tensor]) -> torch.Tensor:
        """All experts of a layer as one tensor, a DTensor if :meth:`to_hf` split one."""
        layout = self._expert_layouts.get(native)
        expected = layout.local_experts if layout else range(self._num_experts())
        if weights.keys() != set(expected):
            missing, extra = set(expected) - weights.keys(), weights.keys() - set(expected)
            raise ValueError(f"{native}: experts {sorted(missing)} are missing, {sorted(extra)} are left over")
        locals_EFD = torch.stack([_local(weights[expert]) for expert in expected])
        if layout is None:
            return locals_EFD
        return DTensor.from_local(
            locals_EFD, layout.mesh, layout.placements, run_check=False, shape=layout.shape, stride=layout.stride
        )

    def _num_experts(self) -> int:
        return next((layer.moe.num_experts for layer in self.model_config.layers if layer.moe is not None), 0)


def check_expert_bias(native: str, bias_E: torch.Tensor) -> None:
    """Refuse a balancing bias that changes the choice of experts.

    Raises:
        ValueError: the bias isn't zero.
    """
    largest = _local(bias_E).abs().max().item()
    if largest > 0:
        raise ValueError(
            f"{native} is up to {largest:.3g}: OlmoeForCausalLM has no place for the balancing bias, so its logits "
            "would differ. To export without it: mula-titan export --drop-expert-bias CHECKPOINT DIR"
        )


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _without_expert_dim(placement: Placement) -> Placement:
    """Placement of one expert's matrix, whose dimensions are one lower than those of the stacked tensor."""
    if isinstance(placement, _StridedShard):
        return _StridedShard(placement.dim - 1, split_factor=placement.split_factor)
    if isinstance(placement, Shard):
        return Shard(placement.dim - 1)
    return placement
