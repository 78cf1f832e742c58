"""Triton kernels for the routed experts of Mixture-of-Experts layers, with a plain-torch reference; and for AdamW.

    out_TD = moe_experts(x_TD, topk_ids_TK, topk_weights_TK, w1_EFD, w3_EFD, w2_EDF)
    out_RD = sorted_experts(x_RD, num_tokens_per_expert_E, w1_EFD, w3_EFD, w2_EDF)

    adamw.adamw(param_N, grad_N, exp_avg_N, exp_avg_sq_N, rates_4, betas=..., eps=...)  # where there is Triton

CUDA and XPU devices run the kernels, all others the reference; `kernel_path(device)` tells which. Needs torch alone:
triton is imported when a device first needs it.
"""

from .ops import kernel_path, moe_experts, sorted_experts, use_path

__all__ = ["kernel_path", "moe_experts", "sorted_experts", "use_path"]
