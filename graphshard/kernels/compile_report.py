"""What Triton makes of the kernel for hardware that need not be here: registers, spills, 128-bit accesses.

    python -m graphshard.kernels.compile_report [--arch 80 90 100] [--json]

Not under ``TRITON_INTERPRET``: a process that interprets cannot compile.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from graphshard.kernels.segmented_copy import ADDRESS_BYTES, ALIGNED, BLOCK, NUM_WARPS, copy_segments
from graphshard.reporting.table_text import write_table

ARCHS = (80, 90, 100)
_TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"


@dataclass(frozen=True)
class Form:
    """A specialization of the kernel: dtypes of the buffer and of the tensors, as Triton names them, and its flags."""

    name: str
    flat: str
    side: str
    pack: bool
    scaled: bool = False
    strided: bool = False
    aligned: bool = True


FORMS = (
    Form("gather copy-in fp32 to bf16", "bf16", "fp32", pack=True),
    Form("gather copy-in fp32 to bf16, unaligned", "bf16", "fp32", pack=True, aligned=False),
    Form("gather copy-in bf16, moved", "i16", "i16", pack=True),
    Form("reduce copy-in bf16 to fp32, scaled", "fp32", "bf16", pack=True, scaled=True),
    Form("reduce copy-in bf16 to fp32, later dims", "fp32", "bf16", pack=True, strided=True),
    Form("gather copy-out bf16, moved", "i16", "i16", pack=False),
    Form("gather copy-out bf16, later dims", "i16", "i16", pack=False, strided=True),
    Form("gather copy-out bf16, unaligned", "i16", "i16", pack=False, aligned=False),
)


@dataclass(frozen=True)
class Resources:
    """Of one compiled form.

    Attributes:
        form: its name.
        arch: compute capability times ten.
        registers: of a thread.
        spill_bytes: of local memory, for what does not fit registers.
        shared_bytes: of a block.
        loads_128, stores_128: instructions for 16 bytes of global memory.
        stores: all instructions that write global memory.
        bf16_conversions: instructions that round to bf16.
        instructions: all.
    """

    form: str
    arch: int
    registers: int
    spill_bytes: int
    shared_bytes: int
    loads_128: int
    stores_128: int
    stores: int
    bf16_conversions: int
    instructions: int


def compiled(form: Form, arch: int) -> Any:
    """Compiles one form; needs no GPU."""
    constants = {
        "side_type": {"fp32": tl.float32, "bf16": tl.bfloat16, "i16": tl.int16}[form.side],
        "pack": form.pack,
        "scaled": form.scaled,
        "strided": form.strided,
        "align": ALIGNED if form.aligned else 1,
        "block_size": BLOCK,
    }
    types = {"flat": f"*{form.flat}", "segments": "*i64", "blocks": "*i32", "row_numel": "i64", "scale": "fp32"}
    place = {name: number for number, name in enumerate(copy_segments.arg_names)}
    divisible = ["segments", "blocks", *(("flat", "row_numel") if form.aligned else ())]
    source = ASTSource(
        fn=copy_segments,
        signature={**types, **dict.fromkeys(constants, "constexpr")},
        constexprs={(place[name],): value for name, value in constants.items()},
        attrs={(place[name],): [["tt.divisibility", ADDRESS_BYTES]] for name in divisible},
    )
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": NUM_WARPS})


def resources(form: Form, arch: int) -> Resources:
    """Compiles one form and reads the machine code.

    Raises:
        subprocess.CalledProcessError: the dump tool refuses the code.
    """
    kernel = compiled(form, arch)
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder, "kernel.cubin")
        binary.write_bytes(kernel.asm["cubin"])
        said, code = (_dumped(binary, what) for what in ("-res-usage", "-sass"))

    def number(name: str) -> int:
        found = re.search(rf"{name}:(\d+)", said)
        assert found is not None, said
        return int(found[1])

    def count(pattern: str) -> int:
        return len(re.findall(pattern, code))

    return Resources(
        form.name,
        arch,
        number("REG"),
        number("STACK") + number("LOCAL"),
        kernel.metadata.shared,
        count(r"LDG\.E[.\w]*\.128"),
        count(r"STG\.E[.\w]*\.128"),
        count(r"STG\.E"),
        count(r"F2FP\.BF16"),
        count(r"/\*[0-9a-f]{4}\*/ +\S"),
    )


def _dumped(binary: Path, what: str) -> str:
    command = [str(_TOOLS / "cuobjdump"), what, str(binary)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def report(archs: tuple[int, ...] = ARCHS) -> list[Resources]:
    """Of every form, for each of `archs`."""
    return [resources(form, arch) for arch in archs for form in FORMS]


def main() -> None:
    """Prints the report."""
    parser = argparse.ArgumentParser("python -m graphshard.kernels.compile_report", description=__doc__)
    parser.add_argument("--arch", type=int, nargs="+", default=ARCHS, help="compute capabilities, times ten")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    found = report(tuple(options.arch))
    if options.json:
        sys.stdout.write(json.dumps([asdict(entry) for entry in found]))
        return
    columns = ("form", ">sm", ">registers", ">spill", ">shared", ">128-bit loads", ">128-bit stores", ">code")
    rows = [
        [
            entry.form,
            str(entry.arch),
            str(entry.registers),
            str(entry.spill_bytes),
            str(entry.shared_bytes),
            str(entry.loads_128),
            f"{entry.stores_128} of {entry.stores}",
            str(entry.instructions),
        ]
        for entry in found
    ]
    write_table(sys.stdout, columns, rows)


if __name__ == "__main__":
    main()
