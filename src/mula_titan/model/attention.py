"""Attention pieces that torchtitan lacks: QK-norm over the whole projected width, and SDPA with a document mask.

Shape suffixes: B = batch, L = sequence length, D = width, N = heads, H = head width.
"""

from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.attention import SDPBackend, sdpa_kernel
from torchtitan.models.common.attention import QKVLinear, ScaledDotProductAttention
from torchtitan.models.common.nn_modules import RMSNorm

CUDA_BACKENDS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


class FullWidthRMSNorm(RMSNorm):
    """RMSNorm over a last dimension that tensor parallelism may split (RMSNorm: arXiv 1910.07467, eq. 4)."""

    @dataclass(kw_only=True, slots=True)
    class Config(RMSNorm.Config):
        pass

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalise ``(B, L, D)``, a plain tensor or a DTensor sharded over D; same shape, dtype and placement out."""
        x_BLD = input.float()
        # A sum, not a mean: DTensor's mean over a sharded dimension needs AVG, which gloo and xccl refuse.
        square_BL1 = x_BLD.square().sum(-1, keepdim=True)
        if isinstance(square_BL1, DTensor):
            square_BL1 = square_BL1.redistribute(placements=[Replicate()] * square_BL1.device_mesh.ndim)
        scale_BL1 = torch.rsqrt(square_BL1 / self.normalized_shape[0] + self.eps)
        return self.weight * (x_BLD * scale_BL1).to(input.dtype)


class NormedQKVLinear(QKVLinear):
    """Three projections, then RMSNorm of q and k over all heads together, then the split into heads (OLMoE)."""

    @dataclass(kw_only=True, slots=True)
    class Config(QKVLinear.Config):
        q_norm: FullWidthRMSNorm.Config
        k_norm: FullWidthRMSNorm.Config

    def __init__(self, config: Config):
        super().__init__(config)
        self.q_norm = config.q_norm.build()
        self.k_norm = config.k_norm.build()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Project ``(B, L, D)`` to q, k and v of shape ``(B, L, local heads, H)``."""
        B, L, _ = x.shape
        q_BLD, k_BLD, v_BLD = self.q_norm(self.wq(x)), self.k_norm(self.wk(x)), self.wv(x)
        # -1: tensor parallelism leaves a part of the heads on this rank.
        q_BLNH, k_BLNH, v_BLNH = (t.view(B, L, -1, self.head_dim) for t in (q_BLD, k_BLD, v_BLD))
        return q_BLNH, k_BLNH, v_BLNH


def document_causal_mask(positions_BL: torch.Tensor) -> torch.Tensor:
    """Boolean mask ``(B, 1, L, L)``, true where query i may see key j: j <= i and both in one document.

    Args:
        positions_BL: int64 positions that restart at 0 with each document.
    """
    document_BL = (positions_BL == 0).cumsum(dim=-1)
    same_BLL = document_BL[:, :, None] == document_BL[:, None, :]
    return same_BLL.tril()[:, None]


class MaskedAttention(ScaledDotProductAttention):
    """Scaled-dot-product attention on any device: causal, or with a boolean mask from :func:`document_causal_mask`.

    FlexAttention has no CPU backward, and torchtitan's SDPA module refuses masks. CUDA takes the first of
    ``CUDA_BACKENDS`` that can; other devices take torch's choice.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ScaledDotProductAttention.Config):
        pass

    def forward(
        self,
        q_BLNH: torch.Tensor,
        k_BLNH: torch.Tensor,
        v_BLNH: torch.Tensor,
        *,
        attention_masks: torch.Tensor | None = None,
        scale: float | None = None,
        enable_gqa: bool = False,
        **kwargs,
    ) -> torch.Tensor:
        """Attend; q ``(B, L, N, H)``, k and v ``(B, L, N_kv, H)``, mask ``(B, 1, L, L)`` bool or None (causal)."""
        # torch's own order puts cuDNN behind flash attention, which is slower on Hopper and later.
        chosen = sdpa_kernel(CUDA_BACKENDS, set_priority=True) if q_BLNH.is_cuda else nullcontext()
        with chosen:
            out_BNLH = F.scaled_dot_product_attention(
                q_BLNH.transpose(1, 2),
                k_BLNH.transpose(1, 2),
                v_BLNH.transpose(1, 2),
                attn_mask=attention_masks,
                is_causal=attention_masks is None,
                scale=scale,
                enable_gqa=enable_gqa,
            )
        return out_BNLH.transpose(1, 2)
