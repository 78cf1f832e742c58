"""Plain-torch twin of every op: the oracle of the tests and the path on devices without Triton.

Same inputs, same outputs, same saved tensors as the kernels, so that either can stand in for the other. Loops over the
experts on the host, so it reads the segment bounds (a device synchronisation on a GPU).

Shape suffixes: T tokens, K picks per token, D model width, F expert width, E local experts, R slots, S slots of one
expert, M row tiles.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .plan import Plan


def build_plan(ids_TK: torch.Tensor, plan: Plan) -> None:
    """Twin of `index.build_plan`."""
    ids_P = ids_TK.reshape(-1).long()
    device, row_tile = ids_TK.device, plan.row_tile
    num_experts, R = plan.E, plan.R
    local_P = (ids_P >= 0) & (ids_P < num_experts)
    key_P = torch.where(local_P, ids_P, num_experts)
    totals_E = torch.bincount(key_P, minlength=num_experts + 1)[:num_experts]
    padded_E = (totals_E + row_tile - 1) // row_tile * row_tile
    ends_E = padded_E.cumsum(0)

    order_P = torch.argsort(key_P, stable=True)
    sorted_key_P = key_P[order_P]
    shift_E = F.pad((ends_E - padded_E) - (totals_E.cumsum(0) - totals_E), (0, 1))
    slot_sorted_P = torch.arange(ids_P.numel(), device=device) + shift_E[sorted_key_P]
    slot_P = torch.empty_like(ids_P).scatter_(0, order_P, slot_sorted_P)
    slot_P = torch.where(local_P, torch.where(slot_P < R, slot_P, -2), -1)

    fits_P = slot_P >= 0
    plan.pick_of_slot_R.fill_(-1)[slot_P[fits_P]] = torch.nonzero(fits_P).flatten().int()
    tile_starts_M = torch.arange(0, R, row_tile, device=device)
    segment_E1 = F.pad(ends_E.clamp(max=R), (1, 0)).int()
    picks_end_E = (ends_E - padded_E + totals_E).clamp(max=R).int()
    by_size_E = torch.argsort(picks_end_E - segment_E1[:-1], descending=True, stable=True)
    plan.slot_of_pick_TK.copy_(slot_P.view(ids_TK.shape))
    plan.segment_E1.copy_(segment_E1)
    plan.expert_of_tile_M.copy_(torch.searchsorted(ends_E, tile_starts_M, right=True))
    plan.segments_by_size_E3.copy_(torch.stack([by_size_E, segment_E1[by_size_E], picks_end_E[by_size_E]], dim=1))


def _gather_rows(x_TD: torch.Tensor, token_S: torch.Tensor) -> torch.Tensor:
    """Rows of x in slot order; padding slots (token < 0) give zeros."""
    return x_TD[token_S.clamp(min=0)].masked_fill((token_S < 0)[:, None], 0)


def _segments(plan: Plan) -> list[tuple[int, slice]]:
    bounds = plan.segment_E1.tolist()
    return [(e, slice(bounds[e], bounds[e + 1])) for e in range(len(bounds) - 1) if bounds[e + 1] > bounds[e]]


def _sum_picks(rows_RD: torch.Tensor, plan: Plan, weights_TK: torch.Tensor | None) -> torch.Tensor:
    """out[t] = sum over k of weights[t, k] * rows[slot[t, k]], accumulated in at least fp32."""
    slots_TK = plan.slot_of_pick_TK.long()
    T, K = slots_TK.shape
    acc_dtype = torch.promote_types(rows_RD.dtype, torch.float32)
    out_TD = torch.zeros(T, rows_RD.shape[1], dtype=acc_dtype, device=rows_RD.device)
    for k in range(K):
        picked_TD = _gather_rows(rows_RD, slots_TK[:, k]).to(acc_dtype)
        out_TD += picked_TD if weights_TK is None else picked_TD * weights_TK[:, k, None].to(acc_dtype)
    overflow_T = (slots_TK == -2).any(dim=1)
    return out_TD.masked_fill(overflow_T[:, None], float("nan")).to(rows_RD.dtype)


def forward(
    x_TD: torch.Tensor,
    ids_TK: torch.Tensor,
    weights_TK: torch.Tensor,
    w1_EFD: torch.Tensor,
    w3_EFD: torch.Tensor,
    w2_EDF: torch.Tensor,
    plan: Plan,
    save: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Routed experts of one layer; fills the empty `plan`.

    Returns:
        out_TD: combined output; rows of tokens beyond `max_rows` are NaN.
        gate_up_R2F: pre-activations of gate (first F columns) and up, in slot order, saved for backward;
            empty unless `save`.
    """
    build_plan(ids_TK, plan)
    K = weights_TK.shape[1]
    _, D, Fdim = w2_EDF.shape
    gate_up_R2F = x_TD.new_zeros(plan.R, 2 * Fdim)
    y_RD = x_TD.new_zeros(plan.R, D)
    for e, rows in _segments(plan):
        x_SD = _gather_rows(x_TD, plan.pick_of_slot_R[rows].long().div(K, rounding_mode="floor"))
        gate_SF, up_SF = x_SD @ w1_EFD[e].T, x_SD @ w3_EFD[e].T
        gate_up_R2F[rows, :Fdim], gate_up_R2F[rows, Fdim:] = gate_SF, up_SF
        y_RD[rows] = (F.silu(gate_SF) * up_SF) @ w2_EDF[e].T
    return _sum_picks(y_RD, plan, weights_TK), gate_up_R2F if save else gate_up_R2F[:0].clone()


def backward(
    dout_TD: torch.Tensor,
    x_TD: torch.Tensor,
    weights_TK: torch.Tensor,
    w1_EFD: torch.Tensor,
    w3_EFD: torch.Tensor,
    w2_EDF: torch.Tensor,
    gate_up_R2F: torch.Tensor,
    plan: Plan,
    overwrite: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of x, weights, w1, w3, w2. The down-projection's output isn't needed: dw[t, k] = <h, W2^T dout[t]>.

    `overwrite` allows the caller's `gate_up_R2F` to be destroyed, and its version says so; only the kernels do it.
    """
    if overwrite:
        torch.autograd.graph.increment_version(gate_up_R2F)
    K = weights_TK.shape[1]
    dw1_EFD, dw3_EFD, dw2_EDF = torch.zeros_like(w1_EFD), torch.zeros_like(w3_EFD), torch.zeros_like(w2_EDF)
    dx_RD = x_TD.new_zeros(gate_up_R2F.shape[0], x_TD.shape[1])
    dweights_P = torch.zeros_like(weights_TK).view(-1)
    acc_dtype = torch.promote_types(x_TD.dtype, torch.float32)
    for e, rows in _segments(plan):
        pick_S = plan.pick_of_slot_R[rows].long()
        is_pick_S = pick_S >= 0
        token_S = pick_S.div(K, rounding_mode="floor")
        x_SD, dout_SD = _gather_rows(x_TD, token_S), _gather_rows(dout_TD, token_S)
        weight_S1 = weights_TK.view(-1)[pick_S.clamp(min=0)].mul(is_pick_S)[:, None].to(acc_dtype)
        # The kernels leave some padding undefined.
        gate_SF, up_SF = gate_up_R2F[rows].to(acc_dtype).masked_fill(~is_pick_S[:, None], 0).chunk(2, dim=1)
        sig_SF = torch.sigmoid(gate_SF)
        silu_SF = gate_SF * sig_SF
        h_SF = (silu_SF * up_SF).to(x_TD.dtype)
        dh_SF = (dout_SD @ w2_EDF[e]).to(acc_dtype)  # not yet times the routing weight
        dweight_S = (h_SF.to(acc_dtype) * dh_SF).sum(dim=1)
        dweights_P[pick_S[is_pick_S]] = dweight_S[is_pick_S].to(dweights_P.dtype)
        dh_SF = dh_SF * weight_S1
        dgate_SF = (dh_SF * up_SF * sig_SF * (1 + gate_SF * (1 - sig_SF))).to(x_TD.dtype)
        dup_SF = (dh_SF * silu_SF).to(x_TD.dtype)
        dw2_EDF[e] = dout_SD.T @ (h_SF * weight_S1).to(x_TD.dtype)
        dw1_EFD[e] = dgate_SF.T @ x_SD
        dw3_EFD[e] = dup_SF.T @ x_SD
        dx_RD[rows] = dgate_SF @ w1_EFD[e] + dup_SF @ w3_EFD[e]
    return _sum_picks(dx_RD, plan, None), dweights_P.view_as(weights_TK), dw1_EFD, dw3_EFD, dw2_EDF
