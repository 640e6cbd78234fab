"""Compiles every Triton kernel for the GPUs it is meant for, on a machine that has none.

    python -m surge_beam.gpu.kernels.ahead_of_time

Prints registers a thread, shared memory and local memory a program, for each kernel and
compute capability. Ends with status 1 if one does not compile, spills registers to local memory or
takes more shared memory than such a GPU has for a program. Takes the options of the launches
themselves; must not run under ``TRITON_INTERPRET``.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from surge_beam.gpu.kernels import attention_triton as attention
from surge_beam.gpu.kernels import elementwise_triton as elementwise
from surge_beam.gpu.kernels import sampling_triton as sampling

# Bytes of shared memory that a program may have, by compute capability (CUDA programming guide,
# technical specifications). That of 8.0 is larger, but 8.6 and 8.9 run the same code.
SHARED_LIMITS = {80: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}

_POINTERS = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16"}
_OPTIONS = ("num_warps", "num_stages")
# (query heads, KV heads, head size) of SmolLM2-135M, Phi-3-mini and Qwen3-8B, by dtype of the pool.
# Float16 compiles as bfloat16 does.
_SMALL, _MEDIUM, _LARGE = (9, 3, 64), (32, 32, 96), (32, 8, 128)
_SHAPES = {
    torch.bfloat16: (_SMALL, _MEDIUM, _LARGE),
    torch.float16: (_SMALL,),
    torch.float32: (_SMALL, _LARGE),
}
_WIDTHS = (576, 4096)
_INNER = 1536
_VOCABULARY = 151_936
_PAGE_SIZE = 16


@dataclasses.dataclass(frozen=True)
class Variant:
    """A kernel as it is launched.

    Attributes:
      name: for the table.
      kernel: the jitted function.
      types: Triton's names of its arguments' types, by argument.
      options: compile-time arguments, and warps and stages.
    """

    name: str
    kernel: Any
    types: Mapping[str, str]
    options: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Usage:
    """What a compiled kernel takes: registers a thread, bytes a program."""

    registers: int
    shared: int
    local: int

    def fits(self, capability: int) -> bool:
        """Whether nothing spills and a GPU of this compute capability has the shared memory."""
        return self.local == 0 and self.shared <= SHARED_LIMITS[capability]


def variants(capability: int) -> Iterator[Variant]:
    """Every kernel, for the dtypes, head sizes and tiles in use; the same names for every GPU."""
    for dtype, shapes in _SHAPES.items():
        for shape in shapes:
            yield from _attention_variants(capability, dtype, *shape)
        yield from _elementwise_variants(dtype)
    yield from _sampling_variants(_VOCABULARY)


def _attention_variants(
    capability: int, dtype: torch.dtype, heads: int, kv_heads: int, dim: int
) -> Iterator[Variant]:
    pool, label = _POINTERS[dtype], f"{str(dtype).removeprefix('torch.')}, {dim}"
    ints = dict.fromkeys(("units", "pages", "rows", "positions"), "*i32")
    partial = {"out": pool, "parts": "*fp32", "log_sums": "*fp32"}
    tensors = dict.fromkeys(("query", "keys", "values"), pool)
    strides = {"query_token": "i32", "query_head": "i32", "pool_head": "i64"}
    for tile in attention.tiles(dtype, dim, capability):
        yield Variant(
            f"attend {label}, {tile.rows} rows",
            attention.attend_kernel,
            {**tensors, **partial, **ints, **strides, "scale": "fp32", "window": "i32"},
            {
                **attention.attend_options(dtype, heads // kv_heads, dim, _PAGE_SIZE, tile),
                "num_warps": tile.warps,
                "num_stages": tile.stages,
            },
        )
    lists = dict.fromkeys(("merged_rows", "merged_offsets", "merged_parts"), "*i32")
    yield Variant(
        f"merge {label}",
        attention.merge_kernel,
        {**partial, **lists},
        {**attention.merge_options(dim), "num_warps": 1},
    )
    own = dict.fromkeys(("key", "value", "keys", "values"), pool)
    yield Variant(
        f"append {label}",
        attention.append_kernel,
        {**own, "slots": "*i64", "key_token": "i32", "value_token": "i32", "pool_head": "i64"},
        {**attention.append_options(kv_heads, dim), "num_warps": 1},
    )
    names = ("qkv", "cos", "sin", "norms", "query", "keys", "values")
    types = {**dict.fromkeys(names, pool), "slots": "*i64", "qkv_token": "i32", "pool_head": "i64"}
    for norms in (False, True):
        yield Variant(
            f"rope and append {label}{', norms' if norms else ''}",
            elementwise.rope_and_append_kernel,
            {**types, "eps": "fp32"},
            {**elementwise.rope_and_append_options(heads, kv_heads, dim), "NORMS": norms},
        )


def _elementwise_variants(dtype: torch.dtype) -> Iterator[Variant]:
    pointer, label = _POINTERS[dtype], str(dtype).removeprefix("torch.")
    tensors = dict.fromkeys(("x", "added", "weight", "out"), pointer)
    strides = dict.fromkeys(("x_token", "added_token"), "i32")
    for width in _WIDTHS:
        for adds in (False, True):
            yield Variant(
                f"{'add and ' if adds else ''}norm {label}, {width}",
                elementwise.rms_norm_kernel,
                {**tensors, **strides, "eps": "fp32"},
                {**elementwise.rms_norm_options(width), "ADDS": adds},
            )
    yield Variant(
        f"silu and mul {label}",
        elementwise.silu_and_mul_kernel,
        {"gate_up": pointer, "out": pointer, "gate_up_token": "i32"},
        elementwise.silu_and_mul_options(_INNER),
    )


def _sampling_variants(vocabulary: int) -> Iterator[Variant]:
    first, second = sampling.argmax_options(vocabulary)
    found = {"values": "*fp32", "ids": "*i64"}
    yield Variant(
        f"argmax of blocks, {vocabulary}",
        sampling.block_argmax_kernel,
        {"logits": "*fp32", "values": "*fp32", "ids": "*i32", "logits_row": "i32"},
        first,
    )
    yield Variant(
        f"argmax of rows, {vocabulary}",
        sampling.row_argmax_kernel,
        {"block_values": "*fp32", "block_ids": "*i32", **found},
        second,
    )
    first, second = sampling.draw_options(vocabulary)
    rows = {"logits": "*fp32", "best": "*fp32", "temperature": "*fp64", "logits_row": "i32"}
    yield Variant(
        f"sums of blocks, {vocabulary}",
        sampling.block_sums_kernel,
        {**rows, "sums": "*fp64"},
        first,
    )
    yield Variant(
        f"draw, {vocabulary}",
        sampling.draw_kernel,
        {**rows, "uniform": "*fp64", "sums": "*fp64", "ids": "*i64"},
        second,
    )


def compile_variant(variant: Variant, capability: int) -> Usage:
    """Compiles a kernel for a GPU; raises whatever Triton does."""
    kernel = variant.kernel
    constants = {k: v for k, v in variant.options.items() if k not in _OPTIONS}
    signature = {
        name: "constexpr" if name in constants else variant.types[name] for name in kernel.arg_names
    }
    # As a launch finds it: memory and strides are multiples of 16.
    aligned = [["tt.divisibility", 16]]
    attributes = {
        (i,): aligned
        for i, (name, kind) in enumerate(signature.items())
        if kind.startswith(("*", "i")) and name != "window"
    }
    source = ASTSource(kernel, signature, constants, attributes)
    options = {k: v for k, v in variant.options.items() if k in _OPTIONS}
    compiled = triton.compile(source, GPUTarget("cuda", capability, 32), options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        told = subprocess.run(
            [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    used = {name: int(number) for name, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", told)}
    return Usage(used["REG"], compiled.metadata.shared, used["STACK"] + used["LOCAL"])


def _compile(task: tuple[int, int]) -> Usage | str:
    """A variant, by its number, for a compute capability; or the last line of what went wrong."""
    number, capability = task
    try:
        return compile_variant(list(variants(capability))[number], capability)
    except Exception as error:
        return str(error).strip().splitlines()[-1] if str(error) else type(error).__name__


def _cell(usage: Usage | str) -> str:
    if isinstance(usage, str):
        return f"failed: {usage}"
    return f"{usage.registers}, {usage.shared / 1024:.1f} KiB, {usage.local}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--capabilities", default="80,90,100,120", help="compute capabilities, times ten"
    )
    parser.add_argument("--only", default="", help="kernels whose name contains this")
    args = parser.parse_args(argv)
    if attention.INTERPRETED:
        parser.error("TRITON_INTERPRET is set: nothing is compiled under it")
    capabilities = [int(c) for c in args.capabilities.split(",")]
    names = [variant.name for variant in variants(capabilities[0])]
    chosen = [i for i, name in enumerate(names) if args.only in name]
    tasks = [(i, c) for i in chosen for c in capabilities]
    workers = min(len(os.sched_getaffinity(0)), len(tasks))
    print("Registers a thread, shared memory a program, bytes of local memory\n")
    print(f"| kernel | {' | '.join(f'sm_{c}' for c in capabilities)} |")
    print("|" + " --- |" * (1 + len(capabilities)))
    bad = 0
    with concurrent.futures.ProcessPoolExecutor(workers) as pool:
        usages = pool.map(_compile, tasks)
        for i in chosen:
            cells = [next(usages) for _ in capabilities]
            print(f"| {names[i]} | {' | '.join(map(_cell, cells))} |", flush=True)
            bad += sum(
                isinstance(usage, str) or not usage.fits(capability)
                for usage, capability in zip(cells, capabilities, strict=True)
            )
    print(f"\n{len(tasks)} built, {bad} of them failed, spilled or too large")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
