"""The kernels compiled for NVIDIA GPUs, which needs none: machine code without spills, on Hopper with full products."""

from __future__ import annotations

import functools
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

triton = pytest.importorskip("triton", reason="this build of torch brings no triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from inductor_kernels import adamw, configs, grouped_gemm, index, layer, permute, swiglu  # noqa: E402
from inductor_kernels.launch import Constants  # noqa: E402
from inductor_kernels.plan import empty_plan  # noqa: E402

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
POINTERS = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int64: "*i64", torch.int32: "*i32"}
ALIGNED = [["tt.divisibility", 16]]
CASES = {
    "Hopper": (90, configs._HOPPER_16BIT, torch.bfloat16),
    "fp32": (90, configs._GENERIC_FP32, torch.float32),
    "Ampere": (80, configs._GENERIC_16BIT, torch.bfloat16),
}
SHARED_MEMORY = {90: 227 * 1024, 80: 163 * 1024}
"""Bytes a program can have."""


def compile_for(capability: int, kernel: Any, how: Constants, args: tuple[Any, ...]) -> Any:
    """What `launch` would compile for these arguments, all pointers aligned to 16 bytes."""
    names = kernel.arg_names
    signature: dict[str, str] = dict.fromkeys(names, "constexpr")
    attributes: dict[tuple[int], Any] = {}
    values: dict[tuple[int], Any] = {(names.index(name),): value for name, value in how.values.items()}
    for i, (name, arg) in enumerate(zip(names, args, strict=False)):
        if isinstance(arg, torch.Tensor):
            signature[name] = POINTERS[arg.dtype]
        elif arg == 1:
            values[(i,)] = 1
        else:
            signature[name] = "i32" if -(2**31) <= arg < 2**31 else "i64"
        if isinstance(arg, torch.Tensor) or arg % 16 == 0:
            attributes[(i,)] = ALIGNED
    source = ASTSource(fn=kernel, signature=signature, constexprs=values, attrs=attributes)
    options = {"num_warps": how.num_warps, "num_stages": how.num_stages}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def disassembled(kernel: Any, what: str, folder: Path) -> str:
    """What cuobjdump tells of a compiled kernel."""
    binary = folder / "kernel.cubin"
    binary.write_bytes(kernel.asm["cubin"])
    return subprocess.run([CUOBJDUMP, what, binary], capture_output=True, text=True, check=True).stdout


@pytest.mark.skipif(not CUOBJDUMP.exists(), reason="this build of triton brings no CUDA tools")
@pytest.mark.parametrize(
    ("T", "D", "F", "E", "K", "distance"),
    [(16384, 2048, 1024, 64, 8, 2**28), (8192, 3072, 1536, 12, 1, -(2**28))],
    ids=["7B", "100B at EP 12, w3 before w1"],
)
@pytest.mark.parametrize("case", CASES)
def test_machine_code(case, T, D, F, E, K, distance, monkeypatch, tmp_path):
    capability, config, dtype = CASES[case]
    compiled: dict[str, Any] = {}

    def launch(kernel, grid, how, *args):
        assert all(0 < n < 2**31 for n in grid)
        compiled[kernel.fn.__name__] = compile_for(capability, kernel, how, args)

    for module in (grouped_gemm, index, permute, swiglu):
        monkeypatch.setattr(module, "launch", launch)
    monkeypatch.setattr(layer, "layer_config", functools.cache(lambda *_: config))
    monkeypatch.setattr(grouped_gemm, "num_programs", lambda _: 132)
    monkeypatch.setattr(grouped_gemm, "_distance", lambda *_: distance)
    x_TD, w1_EFD, w2_EDF = (torch.empty(shape, dtype=dtype, device="meta") for shape in ((T, D), (E, F, D), (E, D, F)))
    ids_TK, weights_TK = (torch.empty(T, K, dtype=d, device="meta") for d in (torch.int64, torch.float32))
    plan = empty_plan(ids_TK, E, config.row_tile, -1)
    out_TD, gate_up_R2F = layer.forward(x_TD, ids_TK, weights_TK, w1_EFD, w1_EFD, w2_EDF, plan)
    layer.backward(out_TD, x_TD, weights_TK, w1_EFD, w1_EFD, w2_EDF, gate_up_R2F, plan, overwrite=True)

    gemms = {f"_{name}_kernel" for name in ("gate_up", "down", "down_backward", "gate_up_backward", "weight_grad")}
    others = {"_assign_kernel", "_swiglu_backward_kernel"}
    others |= {"_count_kernel", "_combine_kernel"} if K > 1 else set()
    others |= {"_gather_kernel"} if case == "Hopper" else set()
    assert set(compiled) == gemms | others
    for name, kernel in compiled.items():
        usage = disassembled(kernel, "-res-usage", tmp_path)
        assert re.search(r"STACK:(\d+)", usage)[1] == "0", f"{name} spills registers: {usage}"
        assert kernel.metadata.shared <= SHARED_MEMORY[capability], name
        if name in gemms and case == "Hopper":
            products = set(re.findall(r"wgmma.mma_async.sync.aligned.(m\d+n\d+k\d+)", kernel.asm["ptx"]))
            half_tiles = {"m64n128k16"} if name == "_gate_up_kernel" else set()
            assert products == {"m64n256k16"} | half_tiles, (name, products)
            assert "cp.async.bulk.tensor" in kernel.asm["ptx"], f"{name} has no tensor-memory loads"


@pytest.mark.skipif(not CUOBJDUMP.exists(), reason="this build of triton brings no CUDA tools")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_machine_code_of_the_update(dtype, monkeypatch, tmp_path):
    """All memory is moved 16 bytes at a time, and no register spills."""
    compiled: dict[str, Any] = {}

    def launch(kernel, grid, how, *args):
        compiled[kernel.fn.__name__] = compile_for(90, kernel, how, args)

    monkeypatch.setattr(adamw, "launch", launch)
    x_N, copy_N = (torch.empty(1_000_000, dtype=d, device="meta") for d in (dtype, torch.bfloat16))
    rates_4 = torch.empty(4, device="meta")
    adamw.adamw(x_N, x_N, x_N, x_N, rates_4, betas=(0.9, 0.95), eps=1e-8, factor=rates_4, copy_N=copy_N)
    adamw.square_sum([x_N])
    assert set(compiled) == {"_adamw_kernel", "_square_sum_kernel"}
    for name, kernel in compiled.items():
        usage = disassembled(kernel, "-res-usage", tmp_path)
        assert re.search(r"STACK:(\d+)", usage)[1] == "0", f"{name} spills registers: {usage}"
        code = disassembled(kernel, "-sass", tmp_path)
        assert len(re.findall(r"LDG\.E\.128", code)) >= 4, name
        assert name == "_square_sum_kernel" or len(re.findall(r"STG\.E\.128", code)) >= 4, name
        scalars = re.findall(r"LDG\.E(?!\.128)", code)
        assert len(scalars) <= 4, f"{name} loads {len(scalars)} times less than 16 bytes a thread"


@pytest.mark.skipif(not CUOBJDUMP.exists(), reason="this build of triton brings no CUDA tools")
@pytest.mark.parametrize("F", [12, 16])
def test_threads_of_a_row_have_one_sum(F, monkeypatch, tmp_path):
    """What a thread gets from another is added as it is: fused with a product, each would have a sum of its own."""
    compiled: list[Any] = []

    def launch(kernel, grid, how, *args):
        compiled.append(compile_for(90, kernel, how, args))

    monkeypatch.setattr(swiglu, "launch", launch)
    ids_TK = torch.empty(64, 2, dtype=torch.int64, device="meta")
    plan = empty_plan(ids_TK, 4, 64, -1)
    dh_RF, gate_up_R2F = (torch.empty(plan.R, width, device="meta") for width in (F, 2 * F))
    swiglu.swiglu_backward(dh_RF, gate_up_R2F, torch.empty(64, 2, device="meta"), plan, True)
    code = disassembled(compiled[0], "-sass", tmp_path)
    instructions = [line.split("*/", 1)[1] for line in code.splitlines() if "*/" in line and ";" in line]
    exchanges = [i for i, text in enumerate(instructions) if "SHFL.BFLY" in text]
    assert exchanges
    for i in exchanges:
        register = re.search(r"SHFL\.BFLY PT, (R\d+),", instructions[i])[1]
        user = next(text for text in instructions[i + 1 :] if re.search(rf", {register}\b", text))
        assert "FADD" in user, user


@pytest.mark.parametrize("value", ["ieee", "tf32"])
def test_precision_of_fp32_products_is_torchs(value):
    """By the setting that makes a read of the older `allow_tf32` raise."""
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    with FakeTensorMode():
        x = torch.empty(1, device="cuda")
    try:
        matmul.fp32_precision = value
        assert grouped_gemm._precision(x) == value
    finally:
        matmul.fp32_precision = before
