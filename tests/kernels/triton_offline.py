"""Compile for sm_90 what a launch function would launch, without a GPU: meta tensors in, ptxas's report out."""

from __future__ import annotations

import contextlib
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

_TYPES = {
    torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.float64: "*fp64",
    torch.int32: "*i32", torch.int64: "*i64", torch.uint8: "*u8", torch.float8_e4m3fn: "*fp8e4nv",
}  # fmt: skip


@dataclass(frozen=True)
class Compiled:
    """What ptxas says of one kernel: registers a thread, bytes of local memory (spills, stack), shared bytes."""

    name: str
    registers: int
    local_bytes: int
    shared_bytes: int
    sass: str = ""


def _signature(function: JITFunction, args: tuple, kwargs: dict) -> tuple[dict, dict, dict]:
    bound = dict(zip(function.arg_names, args, strict=False)) | {
        k: v for k, v in kwargs.items() if k in function.arg_names
    }
    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(function.params):
        value = bound[parameter.name]
        one = type(value) is int and value == 1 and not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or one:
            signature[parameter.name], constants[(index,)] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = _TYPES[value.dtype]
            attributes[(index,)] = [["tt.divisibility", 16]]
        elif hasattr(value, "block_shape"):
            element = _TYPES[value.base.dtype][1:]
            signature[parameter.name] = f"tensordesc<{element}{list(value.block_shape)}>"
        elif isinstance(value, int):
            signature[parameter.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0 and not parameter.do_not_specialize:
                attributes[(index,)] = [["tt.divisibility", 16]]
        else:
            signature[parameter.name] = "fp32"
    return signature, constants, attributes


def compile_launch(function: JITFunction, args: tuple, kwargs: dict, *, sass: bool = False) -> Compiled:
    """The kernel of one launch, compiled for sm_90."""
    signature, constants, attributes = _signature(function, args, kwargs)
    options = {k: kwargs[k] for k in ("num_warps", "num_stages", "maxnreg") if k in kwargs}
    source = ASTSource(function, signature, constants, attributes)
    kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        report = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
        code = subprocess.run([tool, "-sass", file.name], capture_output=True, text=True).stdout if sass else ""
    usage = {k: int(v) for k, v in re.findall(r"(REG|STACK|LOCAL):(\d+)", report)}
    return Compiled(function.__name__, usage["REG"], usage["STACK"] + usage["LOCAL"], kernel.metadata.shared, code)


@contextlib.contextmanager
def compiling(*, sass: bool = False):
    """Within the block every Triton launch is compiled for sm_90 and not run; yields the list of `Compiled`."""
    found: list[Compiled] = []
    run = JITFunction.run

    def record(self, *args, grid, warmup, **kwargs):
        found.append(compile_launch(self, args, kwargs, sass=sass))

    JITFunction.run = record
    try:
        yield found
    finally:
        JITFunction.run = run
