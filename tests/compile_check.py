"""Compiles a kernel file's launches for Hopper on a machine without a GPU and reports what each one costs.

`python -m tests.compile_check tests.kernels.compile_cases.NAME` runs every public function of that module
with Triton's driver replaced: the real wrappers run on CPU tensors, so the real specialisations are
compiled, and nothing is launched. It prints one JSON object a compiled kernel. It needs a process without
TRITON_INTERPRET, hence `compile_module`, which starts one.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

MAX_SHARED = 232_448
"""Bytes of shared memory that one block may have on sm_90; more compiles silently and fails at load."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """One launch: the case that made it, the kernel, and what ptxas says about it (sizes in bytes)."""

    case: str
    kernel: str
    registers: int
    spill_stores: int
    spill_loads: int
    shared: int
    num_warps: int
    wgmma: int


def compile_module(module: str, cache: Path) -> list[Compiled]:
    """Compile every case of `module` in a process of its own; raises with that process's errors."""
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    root = Path(__file__).resolve().parent.parent
    done = subprocess.run(
        [sys.executable, "-m", "tests.compile_check", module],
        cwd=root,
        env={**env, "TRITON_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{module} does not compile for sm_90:\n{done.stderr}")
    return [Compiled(**json.loads(line)) for line in done.stdout.splitlines()]


def main() -> None:
    module = importlib.import_module(sys.argv[1])
    cases = {
        name: case
        for name, case in vars(module).items()
        if not name.startswith("_") and callable(case) and getattr(case, "__module__", "") == module.__name__
    }
    for name, case in cases.items():
        with _fake_hopper() as kernels:
            case()
        for kernel in kernels:
            print(json.dumps(asdict(_measure(name, kernel))))


@contextlib.contextmanager
def _fake_hopper() -> Iterator[list[Any]]:
    """Inside, a launch compiles for sm_90 as its arguments' types and alignment ask, and joins the list."""
    from triton.runtime.jit import JITFunction

    compiled: list[Any] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        compiled.append(run(self, *args, grid=grid, warmup=True, **kwargs))
        return compiled[-1]

    JITFunction.run = compile_only
    try:
        with hopper_driver():
            yield compiled
    finally:
        JITFunction.run = run


@contextlib.contextmanager
def hopper_driver() -> Iterator[None]:
    """Inside, Triton takes this machine for one with a GPU of sm_90."""
    from triton.runtime import driver

    active = getattr(driver, "_active", None)
    driver.set_active(_HopperDriver())
    try:
        yield
    finally:
        driver._active = active


class _HopperDriver:
    """As much of Triton's CUDA driver as compiling needs."""

    class utils:
        """Properties of an H200, which the compiler's options may depend on."""

        @staticmethod
        def get_device_properties(_device: int) -> dict[str, int]:
            return {
                "max_shared_mem": MAX_SHARED,
                "max_num_regs": 65536,
                "multiprocessor_count": 132,
                "warpSize": 32,
                "sm_clock_rate": 1_980_000,
                "mem_clock_rate": 2_619_000,
                "mem_bus_width": 6144,
            }

    launcher_cls = None

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def set_current_device(self, _device: int) -> None:
        return

    def get_current_stream(self, _device: int | None = None) -> int:
        return 0

    def get_device_capability(self, _device: int | None = None) -> tuple[int, int]:
        return 9, 0

    def map_python_to_cpp_type(self, name: str) -> str:
        return name

    def is_active(self) -> bool:
        return True


def _measure(case: str, kernel: Any) -> Compiled:
    ptx = kernel.asm["ptx"]
    usage = _ptxas(ptx)

    def figure(pattern: str) -> int:
        match = re.search(pattern, usage)
        return int(match[1]) if match else 0

    return Compiled(
        case=case,
        kernel=kernel.metadata.name,
        registers=figure(r"Used (\d+) registers"),
        spill_stores=figure(r"(\d+) bytes spill stores"),
        spill_loads=figure(r"(\d+) bytes spill loads"),
        shared=kernel.metadata.shared + figure(r"(\d+) bytes smem"),
        num_warps=kernel.metadata.num_warps,
        wgmma=ptx.count("wgmma.mma_async"),
    )


def _ptxas(ptx: str) -> str:
    """What `ptxas -v` prints for a kernel, with the assembler that Triton's wheel brings."""
    from triton.backends.nvidia.compiler import get_ptxas

    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx)
        done = subprocess.run(
            [get_ptxas(90).path, "-v", "--gpu-name=sm_90a", source, "-o", source.with_suffix(".cubin")],
            capture_output=True,
            text=True,
            check=True,
        )
    return done.stderr + done.stdout


if __name__ == "__main__":
    main()
