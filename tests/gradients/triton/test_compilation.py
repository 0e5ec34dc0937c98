"""Every kernel compiles to machine code for the accelerators that people train on, and no register spills."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

triton = pytest.importorskip("triton", reason="triton is not installed")

from triton.backends import nvidia  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from gradtrack.gradients.triton import changes, kernels  # noqa: E402

TARGETS: Final = (
    GPUTarget("cuda", 80, 32),
    GPUTarget("cuda", 90, 32),
    GPUTarget("cuda", 100, 32),
    GPUTarget("hip", "gfx942", 64),
)
TYPES: Final = {"float32": 1, "float64": 2, "bfloat16": 4, "float16": 8, "all types": 15}
POINTERS: Final = {
    "inputs": "*i64",
    "sizes": "*i64",
    "codes": "*i32",
    "firsts": "*i32",
    "tensor_of": "*i32",
    "partial": "*fp64",
    "rows": "*fp64",
    "outcome": "*fp64",
    "after": "*fp64",
    "limited": "*fp64",
    "found_inf": "*fp32",
    "unit_firsts": "*i32",
    "tensor_of_unit": "*i32",
}


def variants() -> Iterator[Any]:
    """Yield each kernel with the constants that the engine launches it with."""
    for name, types in TYPES.items():
        for scaled in (False, True) if name == "all types" else (False,):
            constants = {"TYPES": types, "CHUNK": 1 << 14, "FACTORS": scaled}
            yield pytest.param(kernels.measure, constants, id=f"measure {name}{' scaled' if scaled else ''}")
            columns = {"COLUMNS": 11 if types & 2 else 8, "REPLACES": scaled, "TYPES": types}
            words = f"{name}{' replacing' if scaled else ''}"
            chunks = {"CHUNK": 1 << 14, **columns}
            yield pytest.param(changes.change, {"CLAMPS": False, "STORES": True, **chunks}, id=f"scale {words}")
            for stores in (True, False):
                constants = {"CLAMPS": True, "STORES": stores, **chunks}
                yield pytest.param(changes.change, constants, id=f"{'clamp' if stores else 'foresee'} {words}")
            yield pytest.param(changes.limit_units, columns, id=f"limit_units {words}")
    for wide in (False, True):
        yield pytest.param(kernels.merge_chunks, {"WIDE": wide, "FACTORS": True}, id=f"merge_chunks {wide}")
        yield pytest.param(changes.decide, {"COLUMNS": 8, "CLIPS": True, "REPLACES": wide}, id=f"decide {wide}")
    yield pytest.param(changes.merge_limited, {}, id="merge_limited")
    yield pytest.param(changes.merge_limited_chunks, {}, id="merge_limited_chunks")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile anew."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))


@pytest.mark.parametrize(
    "target",
    [pytest.param(one, marks=pytest.mark.slow if one.arch in (80, 90) else (), id=str(one.arch)) for one in TARGETS],
)
@pytest.mark.parametrize(("kernel", "constants"), list(variants()))
def test_a_kernel_compiles_and_spills_no_register(kernel: Any, constants: dict[str, Any], target: Any) -> None:
    """Its machine code keeps everything in registers, and reads aligned gradients sixteen bytes at a time."""
    compiled = compile_for(target, kernel, constants)
    if target.backend == "cuda":
        assert local_memory(compiled.asm["cubin"]) == 0
        assert ".ftz" not in compiled.asm["ptx"]  # denormal numbers are no zeros
        if kernel in (kernels.measure, changes.change):
            assert re.search(r"ld\.global\.v(4\.b32|2\.b64)", compiled.asm["ptx"])
    else:
        spilled = re.findall(r"\.[sv]gpr_spill_count:\s*(\d+)", compiled.asm["amdgcn"])
        assert spilled == ["0", "0"]


@pytest.mark.parametrize("kernel", [kernels.measure, changes.change, changes.decide, changes.limit_units])
def test_a_number_of_one_is_a_constant(kernel: Any) -> None:
    """Triton compiles a kernel anew where a number is 1, as with one tensor of one chunk."""
    constants = next(one.values[1] for one in variants() if one.values[0] is kernel)
    ones = {name: 1 for name in kernel.arg_names if name.startswith("num_")}
    compile_for(TARGETS[1], kernel, {**constants, **ones})


def compile_for(target: Any, kernel: Any, constants: dict[str, Any]) -> Any:
    """Compile a kernel as a launch does whose pointers are aligned."""
    signature = {name: POINTERS.get(name, "i32") for name in kernel.arg_names} | dict.fromkeys(constants, "constexpr")
    aligned = {(place,): [["tt.divisibility", 16]] for place, name in enumerate(signature) if name in POINTERS}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    return triton.compile(source, target=target, options={"num_warps": 4, "enable_fp_fusion": True})


def local_memory(cubin: bytes) -> int:
    """Return the bytes of local memory and stack of a kernel, which the assembler uses for registers that spill."""
    Path("kernel.cubin").write_bytes(cubin)
    program = os.path.join(os.path.dirname(nvidia.__file__), "bin", "cuobjdump")
    found = subprocess.run(
        [program, "--dump-resource-usage", "kernel.cubin"], capture_output=True, text=True, check=True
    )
    sizes = re.findall(r"(?:STACK|LOCAL):(\d+)", found.stdout)
    assert len(sizes) == 2, found.stdout
    return sum(map(int, sizes))
