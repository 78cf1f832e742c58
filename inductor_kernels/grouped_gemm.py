"""Grouped GEMMs of the routed experts: kernels and launchers, no autograd.

Row GEMMs (`gate_up`, `down`, `down_backward`, `gate_up_backward`) produce one row tile of the expert-major slots; a
row tile belongs to one expert (see `plan.Plan`). Weight-gradient GEMMs contract over the slots of one expert. All of
them accumulate in fp32 and add in a fixed order. Rows of padding slots are zero because the gathered input rows of
padding slots are; the second half of a row tile that holds nothing but padding is undefined, and never read into a sum.

Programs are persistent where the number of cores is known: program p takes tiles p, p + programs, ... The loops over
tiles and over blocks of the contraction are one but for `gate_up` (Triton's `flatten`; by hand for weight gradients):
the loads of the next tile overlap the epilogue of this one.

Shape suffixes: T tokens, K picks per token, D model width, F expert width, E local experts, R slots, M row tiles,
N column tiles.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from .configs import GemmConfig, num_programs
from .launch import Constants, cdiv, constants, launch, next_power_of_2
from .plan import Plan
from .slots import expert_of_tile_M, pick_of_slot_R, segment_E1, segments_by_size_E3, slot_of_pick_TK


@triton.jit
def _row_tiles(plan_ptr, E, R, BM: tl.constexpr):
    """Number of row tiles in use, addresses of their experts and of the picks in their slots."""
    num_m = tl.load(segment_E1(plan_ptr) + E) // BM
    return num_m, expert_of_tile_M(plan_ptr, E, R), pick_of_slot_R(plan_ptr, E)


@triton.jit
def _tile_coordinates(tile, num_m, num_n, GROUP_M: tl.constexpr):
    """Column-by-column order inside groups of GROUP_M row tiles, so that tiles in flight share operands in L2."""
    group_size = GROUP_M * num_n
    first_m = tile // group_size * GROUP_M
    height = tl.minimum(num_m - first_m, GROUP_M)
    inside = tile % group_size
    return first_m + inside % height, inside // height


@triton.jit
def _weight_operand(
    ptr, E, ROWS: tl.constexpr, COLS: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, DESC: tl.constexpr
):
    """Something `_load_weight` can read: a descriptor over (E, ROWS, COLS), or the pointer."""
    if DESC:
        return tl.make_tensor_descriptor(
            ptr, shape=[E, ROWS, COLS], strides=[ROWS * COLS, COLS, 1], block_shape=[1, BR, BC]
        )
    else:
        return ptr


@triton.jit
def _load_weight(
    operand, e, row, col, ROWS: tl.constexpr, COLS: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, DESC: tl.constexpr
):
    """(BR, BC) block of expert e; zero outside ROWS x COLS."""
    if DESC:
        return operand.load([e, row, col]).reshape(BR, BC)
    else:
        rows = row + tl.arange(0, BR)
        cols = col + tl.arange(0, BC)
        ptrs = operand + e.to(tl.int64) * ROWS * COLS + rows.to(tl.int64)[:, None] * COLS + cols[None, :]
        return tl.load(ptrs, mask=(rows < ROWS)[:, None] & (cols < COLS)[None, :], other=0.0)


@triton.jit
def _pair_operand(
    ptr,
    stride,
    E,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
    HALVES: tl.constexpr,
    SWAPPED: tl.constexpr,
    DESC: tl.constexpr,
):
    """Two weights of one shape, the second `stride` elements from the first, as one operand.

    For `_load_half` (HALVES = 1: a block of either) or `_load_both` (HALVES = 2: the same block of both).
    A descriptor's strides can't be negative: where it is used and the second weight lies before the first, the second
    comes first (SWAPPED).
    """
    if DESC:
        base = ptr
        if SWAPPED:
            base = ptr + stride
            stride = -stride.to(tl.int64)  # -2^31 comes as an int32
        return tl.make_tensor_descriptor(
            base, shape=[2, E, ROWS, COLS], strides=[stride, ROWS * COLS, COLS, 1], block_shape=[HALVES, 1, BR, BC]
        )
    else:
        return ptr


@triton.jit
def _load_half(
    operand,
    stride,
    half,
    e,
    row,
    col,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
    SWAPPED: tl.constexpr,
    DESC: tl.constexpr,
):
    """(BR, BC) block of expert e of the first (half = 0) or second weight; zero outside ROWS x COLS."""
    if DESC:
        if SWAPPED:
            half = 1 - half
        return operand.load([half, e, row, col]).reshape(BR, BC)
    else:
        return _load_weight(operand + half * stride, e, row, col, ROWS, COLS, BR, BC, False)


@triton.jit
def _load_both(
    operand,
    stride,
    e,
    row,
    col,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
    DESC: tl.constexpr,
):
    """(2 BR, BC): the same block of expert e of both weights; zero outside ROWS x COLS.

    The first weight's block is on top, or the second's if SWAPPED.
    """
    if DESC:
        return operand.load([0, e, row, col]).reshape(2 * BR, BC)
    else:
        index = tl.arange(0, 2 * BR)
        rows = row + index % BR
        cols = col + tl.arange(0, BC)
        first = operand + e.to(tl.int64) * ROWS * COLS + (index // BR).to(tl.int64) * stride
        ptrs = first[:, None] + rows.to(tl.int64)[:, None] * COLS + cols[None, :]
        return tl.load(ptrs, mask=(rows < ROWS)[:, None] & (cols < COLS)[None, :], other=0.0)


@triton.jit
def _store_weight(
    operand,
    e,
    row,
    col,
    value,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
    DESC: tl.constexpr,
):
    """Store a (BR, BC) block of expert e, clipped to ROWS x COLS."""
    if DESC:
        operand.store([e, row, col], value.to(operand.dtype).reshape(1, BR, BC))
    else:
        rows = row + tl.arange(0, BR)
        _scatter_rows(operand + e.to(tl.int64) * ROWS * COLS, rows, col, value, COLS, COLS, BC, rows < ROWS)


@triton.jit
def _rows_operand(
    ptr, R, COLS: tl.constexpr, STRIDE: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, DESC: tl.constexpr
):
    """What `_load_rows` and `_store_rows` use: a descriptor over (R, COLS) with rows STRIDE apart, or the pointer."""
    if DESC:
        return tl.make_tensor_descriptor(ptr, shape=[R, COLS], strides=[STRIDE, 1], block_shape=[BR, BC])
    else:
        return ptr


@triton.jit
def _load_rows(
    operand, row, col, COLS: tl.constexpr, STRIDE: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, DESC: tl.constexpr
):
    """(BR, BC) block of consecutive slots; zero outside COLS. Slots in use are a multiple of BR: no row mask."""
    if DESC:
        return operand.load([row, col])
    else:
        rows = row + tl.arange(0, BR)
        cols = col + tl.arange(0, BC)
        ptrs = operand + rows.to(tl.int64)[:, None] * STRIDE + cols[None, :]
        return tl.load(ptrs, mask=(cols < COLS)[None, :] & (rows >= 0)[:, None], other=0.0)


@triton.jit
def _store_rows(
    operand,
    row,
    col,
    value,
    COLS: tl.constexpr,
    STRIDE: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
    DESC: tl.constexpr,
):
    """Store a (BR, BC) block of consecutive slots, clipped to COLS."""
    if DESC:
        operand.store([row, col], value.to(operand.dtype))
    else:
        rows = row + tl.arange(0, BR)
        _scatter_rows(operand, rows, col, value, COLS, STRIDE, BC, rows >= 0)


@triton.jit
def _scatter_rows(ptr, rows, col, value, COLS: tl.constexpr, STRIDE: tl.constexpr, BC: tl.constexpr, row_mask):
    """Store into columns [col, col + BC) of the given rows, clipped to COLS."""
    cols = col + tl.arange(0, BC)
    ptrs = ptr + rows.to(tl.int64)[:, None] * STRIDE + cols[None, :]
    tl.store(ptrs, value.to(ptr.dtype.element_ty), mask=(cols < COLS)[None, :] & row_mask[:, None])


@triton.jit
def _fill_missing(slot_of_pick_ptr, out_ptr, T, COLS: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr):
    """For K = 1, where a GEMM scatters straight to tokens: rows of tokens without slot, dealt to the programs.

    Zero, or NaN where `max_rows` left the token out.
    """
    for start in range(tl.program_id(0) * BR, T, tl.num_programs(0) * BR):
        tokens = start + tl.arange(0, BR)
        slots = tl.load(slot_of_pick_ptr + tokens, mask=tokens < T, other=0)
        if tl.min(slots, axis=0) < 0:
            fill = tl.zeros((BR, BC), tl.float32) + tl.where(slots == -2, float("nan"), 0.0)[:, None]
            for col in range(0, COLS, BC):
                _scatter_rows(out_ptr, tokens, col, fill, COLS, COLS, BC, slots < 0)


@triton.jit
def _split_columns(value, BM: tl.constexpr, BN: tl.constexpr):
    """Left and right half of a (BM, BN) block, without leaving the registers."""
    return value.reshape(BM, 2, BN // 2).permute(0, 2, 1).split()


@triton.jit
def _gather_rows(ptr, picks, col, K: tl.constexpr, COLS: tl.constexpr, BC: tl.constexpr):
    """(len(picks), BC) block whose rows are the picks' tokens; zero in padding slots and outside COLS."""
    cols = col + tl.arange(0, BC)
    ptrs = ptr + (picks // K).to(tl.int64)[:, None] * COLS + cols[None, :]
    mask = (picks >= 0)[:, None]
    if COLS % BC != 0:
        mask = mask & (cols < COLS)[None, :]
    return tl.load(ptrs, mask=mask, other=0.0)


@triton.jit
def _gate_up_tile(
    x_ptr,
    pick_of_slot_ptr,
    w13,
    h_ptr,
    gate_up_ptr,
    w3_minus_w1,
    R,
    e,
    row,
    col,
    K: tl.constexpr,
    D: tl.constexpr,
    F: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GATHER: tl.constexpr,
    SAVE: tl.constexpr,
    SWAPPED: tl.constexpr,
    DESC: tl.constexpr,
    STORE_DESC: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """BM rows of `_gate_up_kernel` from `row` on, BN columns from `col` on."""
    if GATHER:
        picks = tl.load(pick_of_slot_ptr + row + tl.arange(0, BM))
    else:
        x = _rows_operand(x_ptr, R, D, D, BM, BK, DESC)
    acc = tl.zeros((BM, 2 * BN), tl.float32)
    for k in tl.range(0, D, BK):
        if GATHER:  # noqa: SIM108
            a = _gather_rows(x_ptr, picks, k, K, D, BK)
        else:
            a = _load_rows(x, row, k, D, D, BM, BK, DESC)
        b = _load_both(w13, w3_minus_w1, e, col, k, F, D, BN, BK, DESC)
        acc = tl.dot(a, b.T, acc, input_precision=PRECISION)
    # Backward recomputes h from the stored pre-activations: round them first so that both see the same h.
    if SWAPPED:
        up, gate = _split_columns(acc.to(h_ptr.dtype.element_ty), BM, 2 * BN)
    else:
        gate, up = _split_columns(acc.to(h_ptr.dtype.element_ty), BM, 2 * BN)
    if SAVE:
        gate_out = _rows_operand(gate_up_ptr, R, F, 2 * F, BM, BN, STORE_DESC)
        up_out = _rows_operand(gate_up_ptr + F, R, F, 2 * F, BM, BN, STORE_DESC)
        _store_rows(gate_out, row, col, gate, F, 2 * F, BM, BN, STORE_DESC)
        _store_rows(up_out, row, col, up, F, 2 * F, BM, BN, STORE_DESC)
    h_out = _rows_operand(h_ptr, R, F, F, BM, BN, STORE_DESC)
    gate32 = gate.to(tl.float32)
    h = gate32 * tl.sigmoid(gate32) * up.to(tl.float32)
    _store_rows(h_out, row, col, h, F, F, BM, BN, STORE_DESC)


@triton.jit
def _gate_up_kernel(
    x_ptr,
    plan_ptr,
    w1_ptr,
    h_ptr,
    gate_up_ptr,
    w3_minus_w1,
    E,
    R,
    K: tl.constexpr,
    D: tl.constexpr,
    F: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP_M: tl.constexpr,
    GATHER: tl.constexpr,
    SAVE: tl.constexpr,
    SWAPPED: tl.constexpr,
    DESC: tl.constexpr,
    STORE_DESC: tl.constexpr,
    PRECISION: tl.constexpr,
):
    num_m, expert_of_tile_ptr, pick_of_slot_ptr = _row_tiles(plan_ptr, E, R, BM)
    num_n: tl.constexpr = (F + BN - 1) // BN
    w13 = _pair_operand(w1_ptr, w3_minus_w1, E, F, D, BN, BK, 2, SWAPPED, DESC)
    num_tiles = num_m * num_n
    num_programs = tl.num_programs(0)
    for turn_tile in tl.range(tl.program_id(0), num_tiles, num_programs):
        # Half tiles may come at a regular distance: shift by one each turn, so that each program gets its share.
        turn = turn_tile // num_programs
        shifted = turn * num_programs + (turn_tile + turn) % num_programs
        tile = tl.where((turn + 1) * num_programs <= num_tiles, shifted, turn_tile)
        m, n = _tile_coordinates(tile, num_m, num_n, GROUP_M)
        e = tl.load(expert_of_tile_ptr + m)
        row = m * BM
        at = (x_ptr, pick_of_slot_ptr, w13, h_ptr, gate_up_ptr, w3_minus_w1, R, e, row, n * BN)
        if tl.load(pick_of_slot_ptr + row + BM // 2) >= 0:
            _gate_up_tile(*at, K, D, F, BM, BN, BK, GATHER, SAVE, SWAPPED, DESC, STORE_DESC, PRECISION)
        else:  # the second half is padding that nobody reads: one tile in two where experts have few rows
            _gate_up_tile(*at, K, D, F, BM // 2, BN, BK, GATHER, SAVE, SWAPPED, DESC, STORE_DESC, PRECISION)


@triton.jit
def _down_kernel(
    h_ptr,
    plan_ptr,
    weights_ptr,
    w2_ptr,
    out_ptr,
    T,
    E,
    R,
    D: tl.constexpr,
    F: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP_M: tl.constexpr,
    SCATTER: tl.constexpr,
    DESC: tl.constexpr,
    STORE_DESC: tl.constexpr,
    PRECISION: tl.constexpr,
):
    num_m, expert_of_tile_ptr, pick_of_slot_ptr = _row_tiles(plan_ptr, E, R, BM)
    num_n: tl.constexpr = (D + BN - 1) // BN
    h = _rows_operand(h_ptr, R, F, F, BM, BK, DESC)
    if SCATTER:
        _fill_missing(slot_of_pick_TK(plan_ptr, E, R, BM), out_ptr, T, D, BM, BN)
    else:
        out = _rows_operand(out_ptr, R, D, D, BM, BN // 2, STORE_DESC)
    w2 = _weight_operand(w2_ptr, E, D, F, BN, BK, DESC)
    for tile in tl.range(tl.program_id(0), num_m * num_n, tl.num_programs(0), flatten=True):
        m, n = _tile_coordinates(tile, num_m, num_n, GROUP_M)
        e = tl.load(expert_of_tile_ptr + m)
        acc = tl.zeros((BM, BN), tl.float32)
        for k in tl.range(0, F, BK):
            a = _load_rows(h, m * BM, k, F, F, BM, BK, DESC)
            b = _load_weight(w2, e, n * BN, k, D, F, BN, BK, DESC)
            acc = tl.dot(a, b.T, acc, input_precision=PRECISION)
        if SCATTER:
            picks = tl.load(pick_of_slot_ptr + m * BM + tl.arange(0, BM))
            weights = tl.load(weights_ptr + picks, mask=picks >= 0, other=0.0).to(tl.float32)
            _scatter_rows(out_ptr, picks, n * BN, acc * weights[:, None], D, D, BN, picks >= 0)
        else:
            left, right = _split_columns(acc, BM, BN)
            _store_rows(out, m * BM, n * BN, left, D, D, BM, BN // 2, STORE_DESC)
            _store_rows(out, m * BM, n * BN + BN // 2, right, D, D, BM, BN // 2, STORE_DESC)


@triton.jit
def _down_backward_kernel(
    dout_ptr,
    plan_ptr,
    w2_ptr,
    dh_ptr,
    E,
    R,
    K: tl.constexpr,
    D: tl.constexpr,
    F: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP_M: tl.constexpr,
    GATHER: tl.constexpr,
    DESC: tl.constexpr,
    STORE_DESC: tl.constexpr,
    PRECISION: tl.constexpr,
):
    num_m, expert_of_tile_ptr, pick_of_slot_ptr = _row_tiles(plan_ptr, E, R, BM)
    num_n: tl.constexpr = (F + BN - 1) // BN
    w2 = _weight_operand(w2_ptr, E, D, F, BK, BN, DESC)
    dh = _rows_operand(dh_ptr, R, F, F, BM, BN // 2, STORE_DESC)
    if not GATHER:
        dout = _rows_operand(dout_ptr, R, D, D, BM, BK, DESC)
    for tile in tl.range(tl.program_id(0), num_m * num_n, tl.num_programs(0), flatten=True):
        m, n = _tile_coordinates(tile, num_m, num_n, GROUP_M)
        e = tl.load(expert_of_tile_ptr + m)
        if GATHER:
            picks = tl.load(pick_of_slot_ptr + m * BM + tl.arange(0, BM))
        acc = tl.zeros((BM, BN), tl.float32)
        for k in tl.range(0, D, BK):
            if GATHER:
                a = _gather_rows(dout_ptr, picks, k, K, D, BK)
            else:
                a = _load_rows(dout, m * BM, k, D, D, BM, BK, DESC)
            b = _load_weight(w2, e, k, n * BN, D, F, BK, BN, DESC)
            acc = tl.dot(a, b, acc, input_precision=PRECISION)
        left, right = _split_columns(acc, BM, BN)
        _store_rows(dh, m * BM, n * BN, left, F, F, BM, BN // 2, STORE_DESC)
        _store_rows(dh, m * BM, n * BN + BN // 2, right, F, F, BM, BN // 2, STORE_DESC)


@triton.jit
def _gate_up_backward_kernel(
    dgate_up_ptr,
    plan_ptr,
    w1_ptr,
    dx_ptr,
    w3_minus_w1,
    T,
    E,
    R,
    D: tl.constexpr,
    F: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP_M: tl.constexpr,
    SCATTER: tl.constexpr,
    SWAPPED: tl.constexpr,
    DESC: tl.constexpr,
    STORE_DESC: tl.constexpr,
    PRECISION: tl.constexpr,
):
    num_m, expert_of_tile_ptr, pick_of_slot_ptr = _row_tiles(plan_ptr, E, R, BM)
    num_n: tl.constexpr = (D + BN - 1) // BN
    dgate_up = _rows_operand(dgate_up_ptr, R, 2 * F, 2 * F, BM, BK, DESC)
    if SCATTER:
        _fill_missing(slot_of_pick_TK(plan_ptr, E, R, BM), dx_ptr, T, D, BM, BN)
    else:
        dx = _rows_operand(dx_ptr, R, D, D, BM, BN // 2, STORE_DESC)
    num_k: tl.constexpr = (F + BK - 1) // BK
    w13 = _pair_operand(w1_ptr, w3_minus_w1, E, F, D, BK, BN, 1, SWAPPED, DESC)
    for tile in tl.range(tl.program_id(0), num_m * num_n, tl.num_programs(0), flatten=True):
        m, n = _tile_coordinates(tile, num_m, num_n, GROUP_M)
        e = tl.load(expert_of_tile_ptr + m)
        acc = tl.zeros((BM, BN), tl.float32)
        # One loop over both halves of the contraction. Where BK doesn't divide F the last block of dgate reads into
        # dup: the weight block is zero there.
        for i in tl.range(0, 2 * num_k):
            half = i // num_k
            k = (i % num_k) * BK
            a = _load_rows(dgate_up, m * BM, half * F + k, 2 * F, 2 * F, BM, BK, DESC)
            b = _load_half(w13, w3_minus_w1, half, e, k, n * BN, F, D, BK, BN, SWAPPED, DESC)
            acc = tl.dot(a, b, acc, input_precision=PRECISION)
        if SCATTER:
            picks = tl.load(pick_of_slot_ptr + m * BM + tl.arange(0, BM))
            _scatter_rows(dx_ptr, picks, n * BN, acc, D, D, BN, picks >= 0)
        else:
            left, right = _split_columns(acc, BM, BN)
            _store_rows(dx, m * BM, n * BN, left, D, D, BM, BN // 2, STORE_DESC)
            _store_rows(dx, m * BM, n * BN + BN // 2, right, D, D, BM, BN // 2, STORE_DESC)


@triton.jit
def _dealt_tile(turn):
    """Tile of this program in a turn, dealt there and back: costs of tiles that come in falling order even out."""
    program = tl.program_id(0)
    num_programs = tl.num_programs(0)
    return turn * num_programs + tl.where(turn % 2 == 1, num_programs - 1 - program, program)


@triton.jit
def _weight_grad_tile(
    turn,
    segments_by_size_ptr,
    NUM_HALF: tl.constexpr,
    NUM_M: tl.constexpr,
    NUM_N: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """Entry of `segments_by_size`, half, row and column of the tile that this program takes in a turn."""
    tile = _dealt_tile(turn)
    m, n = _tile_coordinates(tile % (NUM_M * NUM_N), NUM_M, NUM_N, GROUP_M)
    segment = segments_by_size_ptr + 3 * (tile // (NUM_M * NUM_N))
    return segment, m // NUM_HALF, (m % NUM_HALF) * BM, n * BN


@triton.jit
def _store_weight_grad(
    out0,
    out1,
    e,
    half,
    row,
    col,
    value,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    HALVES: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
    DESC: tl.constexpr,
):
    """Store a (BR, 2 BC) tile of expert e of the first (half = 0) or second gradient, as two (BR, BC) blocks."""
    left, right = _split_columns(value, BR, 2 * BC)
    if HALVES == 1 or half == 0:
        _store_weight(out0, e, row, col, left, ROWS, COLS, BR, BC, DESC)
        _store_weight(out0, e, row, col + BC, right, ROWS, COLS, BR, BC, DESC)
    else:
        _store_weight(out1, e, row, col, left, ROWS, COLS, BR, BC, DESC)
        _store_weight(out1, e, row, col + BC, right, ROWS, COLS, BR, BC, DESC)


@triton.jit
def _weight_grad_kernel(
    a_ptr,
    b_ptr,
    plan_ptr,
    out0_ptr,
    out1_ptr,
    E,
    R,
    out_col,
    K: tl.constexpr,
    A_COLS: tl.constexpr,
    B_COLS: tl.constexpr,
    OUT_COLS: tl.constexpr,
    HALVES: tl.constexpr,
    MAX_TURNS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP_M: tl.constexpr,
    GATHER_A: tl.constexpr,
    GATHER_B: tl.constexpr,
    DESC: tl.constexpr,
    STORE_DESC: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """out[e] = A_e^T B_e over the slots of e, into columns [out_col, out_col + B_COLS) of OUT_COLS.

    The first A_COLS columns of A go to out0, the next A_COLS (if HALVES = 2) to out1.
    """
    num_half: tl.constexpr = (A_COLS + BM - 1) // BM
    num_m: tl.constexpr = num_half * HALVES
    num_n: tl.constexpr = (B_COLS + BN - 1) // BN
    ALL_A_COLS: tl.constexpr = A_COLS * HALVES
    if not GATHER_A:
        a_rows = _rows_operand(a_ptr, R, ALL_A_COLS, ALL_A_COLS, BK, BM, DESC)
    if not GATHER_B:
        b_rows = _rows_operand(b_ptr, R, B_COLS, B_COLS, BK, BN, DESC)
    out0 = _weight_operand(out0_ptr, E, A_COLS, OUT_COLS, BM, BN // 2, STORE_DESC)
    out1 = _weight_operand(out1_ptr, E, A_COLS, OUT_COLS, BM, BN // 2, STORE_DESC) if HALVES == 2 else out0
    num_tiles = E * num_m * num_n
    segments_by_size_ptr = segments_by_size_E3(plan_ptr, E)
    pick_of_slot_ptr = pick_of_slot_R(plan_ptr, E)
    # A tile takes as long as its expert has picks; blocks past the last pick hold padding, zero rows.
    turns = tl.arange(0, MAX_TURNS)
    tiles = _dealt_tile(turns)
    is_tile = tiles < num_tiles
    segments = segments_by_size_ptr + 3 * (tiles // (num_m * num_n))
    sizes = tl.load(segments + 2, mask=is_tile, other=0) - tl.load(segments + 1, mask=is_tile, other=0)
    num_steps = tl.sum((sizes + BK - 1) // BK, axis=0)
    # One loop over the contractions of all tiles: a tile's first loads overlap the end and the store of the one before.
    # What the loads need is updated before them, else the loop can't be pipelined.
    turn = -1
    e, half, row, col = 0, 0, 0, 0
    k, last = 0, 0
    acc = tl.zeros((BM, BN), tl.float32)
    for _ in tl.range(0, num_steps):
        k += BK
        if k >= last:
            turn += 1
            segment, half, row, col = _weight_grad_tile(
                turn, segments_by_size_ptr, num_half, num_m, num_n, BM, BN, GROUP_M
            )
            e, k, last = tl.load(segment), tl.load(segment + 1), tl.load(segment + 2)
        if GATHER_A or GATHER_B:
            picks = tl.load(pick_of_slot_ptr + k + tl.arange(0, BK))
        if GATHER_A:
            a = _gather_rows(a_ptr, picks, half * A_COLS + row, K, ALL_A_COLS, BM)
        else:
            a = _load_rows(a_rows, k, half * A_COLS + row, ALL_A_COLS, ALL_A_COLS, BK, BM, DESC)
        if GATHER_B:
            b = _gather_rows(b_ptr, picks, col, K, B_COLS, BN)
        else:
            b = _load_rows(b_rows, k, col, B_COLS, B_COLS, BK, BN, DESC)
        acc = tl.dot(a.T, b, acc, input_precision=PRECISION)
        if k + BK >= last:
            _store_weight_grad(
                out0, out1, e, half, row, out_col + col, acc, A_COLS, OUT_COLS, HALVES, BM, BN // 2, STORE_DESC
            )
            acc = tl.zeros((BM, BN), tl.float32)
    # Experts without picks come last.
    num_turns = tl.sum(is_tile.to(tl.int32), axis=0)
    for turn in range(tl.sum((sizes > 0).to(tl.int32), axis=0), num_turns):
        segment, half, row, col = _weight_grad_tile(turn, segments_by_size_ptr, num_half, num_m, num_n, BM, BN, GROUP_M)
        e = tl.load(segment)
        zeros = tl.zeros((BM, BN), tl.float32)
        _store_weight_grad(
            out0, out1, e, half, row, out_col + col, zeros, A_COLS, OUT_COLS, HALVES, BM, BN // 2, STORE_DESC
        )


def _descriptors_fit(widths: tuple[int, int], *tensors: torch.Tensor) -> bool:
    """Tensor descriptors need 16-byte aligned bases, rows (D, F or 2F long) and columns (from 0 or F on).

    New tensors, which the kernels write, have such bases.
    """
    size = tensors[0].element_size()
    return not any([width * size % 16 for width in widths] + [t.data_ptr() % 16 for t in tensors])


def _precision(tensor: torch.Tensor) -> str:
    """fp32 inputs follow torch's own switch for matrix products; 16-bit inputs don't care."""
    # Not `allow_tf32`, which raises where the user has set this one.
    if tensor.dtype == torch.float32 and tensor.is_cuda and torch.backends.cuda.matmul.fp32_precision == "tf32":
        return "tf32"
    return "ieee"


def _grid(device: torch.device, max_tiles: int) -> tuple[int]:
    # One at least, also where there is no tile: tokens without slot must still be filled.
    return (max(1, min(num_programs(device) or max_tiles, max_tiles)),)


@functools.cache
def _constants(config: GemmConfig, descriptors: bool, precision: str, **values: int) -> Constants:
    """`constants` of a GEMM: tiles and stages from its config, the rest by name."""
    return constants(
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        BM=config.block_m,
        BN=config.block_n,
        BK=config.block_k,
        GROUP_M=config.group_m,
        DESC=descriptors,
        STORE_DESC=descriptors and config.descriptor_stores,
        PRECISION=precision,
        **values,
    )


def _launch_constants(config: GemmConfig, widths: tuple[int, int], *tensors: torch.Tensor, **values: int) -> Constants:
    """Of a kernel that reads these tensors, and writes new ones, by descriptors where D, F and addresses allow it."""
    return _constants(config, _descriptors_fit(widths, *tensors), _precision(tensors[0]), **values)


def _distance(w1_EFD: torch.Tensor, w3_EFD: torch.Tensor) -> int:
    """Elements from the first weight to the second: the outer stride of the two as one operand."""
    return (w3_EFD.data_ptr() - w1_EFD.data_ptr()) // w1_EFD.element_size()


def _pair_constants(
    config: GemmConfig, widths: tuple[int, int], distance: int, *tensors: torch.Tensor, **values: int
) -> Constants:
    """`_launch_constants` of a kernel that reads W1 and W3 as one operand."""
    # Tensor descriptors on Hopper take strides below 2^40 bytes.
    fit = abs(distance) * tensors[-1].element_size() < 2**40 and _descriptors_fit(widths, *tensors)
    return _constants(config, fit, _precision(tensors[0]), SWAPPED=fit and distance < 0, **values)


def gate_up(
    x_TD: torch.Tensor,
    w1_EFD: torch.Tensor,
    w3_EFD: torch.Tensor,
    plan: Plan,
    config: GemmConfig,
    save: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """h = silu(x W1^T) * (x W3^T) in slot order, and the pre-activations (empty unless `save`)."""
    E, F, D = w1_EFD.shape
    R, K = plan.R, plan.K
    h_RF = x_TD.new_empty(R, F)
    gate_up_R2F = x_TD.new_empty(R if save else 0, 2 * F)
    distance = _distance(w1_EFD, w3_EFD)
    tiles = plan.M * cdiv(F, config.block_n)
    launch(
        _gate_up_kernel,
        _grid(x_TD.device, tiles),
        _pair_constants(config, (D, F), distance, x_TD, w1_EFD, w3_EFD, K=K, D=D, F=F, GATHER=config.gather, SAVE=save),
        x_TD,
        plan.memory_N,
        w1_EFD,
        h_RF,
        gate_up_R2F,
        distance,
        E,
        R,
    )
    return h_RF, gate_up_R2F


def down(
    h_RF: torch.Tensor, w2_EDF: torch.Tensor, weights_TK: torch.Tensor, plan: Plan, config: GemmConfig
) -> torch.Tensor:
    """y = h W2^T in slot order; for K = 1 times the routing weight, in token order."""
    E, D, F = w2_EDF.shape
    T, K = weights_TK.shape
    R = h_RF.shape[0]
    out = h_RF.new_empty(T if K == 1 else R, D)
    tiles = plan.M * cdiv(D, config.block_n)
    launch(
        _down_kernel,
        _grid(h_RF.device, tiles),
        _launch_constants(config, (D, F), h_RF, w2_EDF, D=D, F=F, SCATTER=K == 1),
        h_RF,
        plan.memory_N,
        weights_TK,
        w2_EDF,
        out,
        T,
        E,
        R,
    )
    return out


def down_backward(dout: torch.Tensor, w2_EDF: torch.Tensor, plan: Plan, config: GemmConfig) -> torch.Tensor:
    """dh = dout W2 in slot order, before the routing weight."""
    E, D, F = w2_EDF.shape
    R = plan.R
    dh_RF = dout.new_empty(R, F)
    tiles = plan.M * cdiv(F, config.block_n)
    launch(
        _down_backward_kernel,
        _grid(dout.device, tiles),
        _launch_constants(config, (D, F), dout, w2_EDF, K=plan.K, D=D, F=F, GATHER=config.gather),
        dout,
        plan.memory_N,
        w2_EDF,
        dh_RF,
        E,
        R,
    )
    return dh_RF


def gate_up_backward(
    dgate_up_R2F: torch.Tensor, w1_EFD: torch.Tensor, w3_EFD: torch.Tensor, plan: Plan, config: GemmConfig
) -> torch.Tensor:
    """dx = dgate W1 + dup W3 in slot order; for K = 1 in token order."""
    E, F, D = w1_EFD.shape
    T, K = plan.T, plan.K
    R = dgate_up_R2F.shape[0]
    dx = dgate_up_R2F.new_empty(T if K == 1 else R, D)
    distance = _distance(w1_EFD, w3_EFD)
    tiles = plan.M * cdiv(D, config.block_n)
    launch(
        _gate_up_backward_kernel,
        _grid(dx.device, tiles),
        _pair_constants(config, (D, F), distance, dgate_up_R2F, w1_EFD, w3_EFD, D=D, F=F, SCATTER=K == 1),
        dgate_up_R2F,
        plan.memory_N,
        w1_EFD,
        dx,
        distance,
        T,
        E,
        R,
    )
    return dx


def gate_up_weight_grad(
    dgate_up_R2F: torch.Tensor,
    x: torch.Tensor,
    dw1_EFD: torch.Tensor,
    dw3_EFD: torch.Tensor,
    column: int,
    plan: Plan,
    config: GemmConfig,
) -> None:
    """dW1 = dgate^T x and dW3 = dup^T x per expert, one launch, for the columns of x from `column` on.

    Where the block width doesn't divide x's, zeros land in the columns after it: go through the columns in order.
    """
    E, F, D = dw1_EFD.shape
    width = x.shape[1]
    tiles = 2 * E * cdiv(F, config.block_m) * cdiv(width, config.block_n)
    grid = _grid(x.device, tiles)
    launch(
        _weight_grad_kernel,
        grid,
        _launch_constants(
            config,
            (D, F),
            dgate_up_R2F,
            x,
            K=plan.K,
            A_COLS=F,
            B_COLS=width,
            OUT_COLS=D,
            HALVES=2,
            MAX_TURNS=next_power_of_2(cdiv(tiles, grid[0])),
            GATHER_A=False,
            GATHER_B=config.gather,
        ),
        dgate_up_R2F,
        x,
        plan.memory_N,
        dw1_EFD,
        dw3_EFD,
        E,
        dgate_up_R2F.shape[0],
        column,
    )


def down_weight_grad(
    dout_TD: torch.Tensor, weighted_h_RF: torch.Tensor, plan: Plan, config: GemmConfig
) -> torch.Tensor:
    """dW2 = dout^T (weight * h) per expert; dout gathered by the loads."""
    E = plan.E
    D, F = dout_TD.shape[1], weighted_h_RF.shape[1]
    dw2_EDF = dout_TD.new_empty(E, D, F)
    tiles = E * cdiv(D, config.block_m) * cdiv(F, config.block_n)
    grid = _grid(dout_TD.device, tiles)
    launch(
        _weight_grad_kernel,
        grid,
        _launch_constants(
            config,
            (D, F),
            dout_TD,
            weighted_h_RF,
            K=plan.K,
            A_COLS=D,
            B_COLS=F,
            OUT_COLS=F,
            HALVES=1,
            MAX_TURNS=next_power_of_2(cdiv(tiles, grid[0])),
            GATHER_A=config.gather,
            GATHER_B=False,
        ),
        dout_TD,
        weighted_h_RF,
        plan.memory_N,
        dw2_EDF,
        dw2_EDF,
        E,
        weighted_h_RF.shape[0],
        0,
    )
    return dw2_EDF
