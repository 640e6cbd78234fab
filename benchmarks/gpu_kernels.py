"""The Triton kernels against torch's own operations, and against the GPU's copy bandwidth.

    python -m benchmarks.gpu_kernels

Every figure is the median over replays of a CUDA graph that goes through as many layers as do not
fit the L2 cache, so that neither launches nor cached keys count. Torch's attention reads keys that
lie in one piece, ours reads scattered pages. Without a CUDA device nothing is measured.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.common import save, say, table
from surge_beam.gpu.attention_plan import plan_attention, share_groups

PAGE_SIZE = 16
REPLAYS = 20
# (query heads, KV heads, head size) of SmolLM2-135M and Qwen3-8B.
HEADS = ((9, 3, 64), (32, 8, 128))
WIDTHS = ((9, 3, 64, 576, 1536, 49_152), (32, 8, 128, 4096, 12_288, 151_936))


@dataclasses.dataclass(frozen=True)
class Shape:
    """Equal sequences: tokens of a prefix that all share, own tokens in the pool, new tokens."""

    name: str
    sequences: int
    prefix: int
    own: int
    new: int


SHAPES = (
    Shape("decode", 1, 0, 4096, 1),
    Shape("decode", 32, 0, 512, 1),
    Shape("decode", 128, 0, 512, 1),
    Shape("decode", 32, 0, 4096, 1),
    Shape("shared prefix", 32, 1024, 64, 1),
    Shape("shared prefix", 64, 2048, 128, 1),
    Shape("shared prefix", 64, 6016, 128, 1),
    Shape("shared prefix", 128, 2048, 128, 1),
    Shape("prefill", 1, 0, 0, 2048),
    Shape("prefill", 8, 0, 0, 512),
    Shape("prefill of a suffix", 8, 2048, 0, 128),
)


def seconds(call: Callable[[int], Any], layers: int) -> float:
    """Of one call, over a graph that calls it with every layer."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for layer in range(min(3, layers)):
            call(layer)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [call(layer) for layer in range(layers)]
    graph.replay()
    times = []
    for _ in range(REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / layers)
    del kept
    return statistics.median(times)


def copy_bandwidth() -> float:
    """Bytes a second that a copy reads and writes."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * len(source) / seconds(lambda _: target.copy_(source), 4)


def layers_beyond_cache(size: int) -> int:
    """So many layers of ``size`` bytes that none is in the L2 cache when it is read again."""
    cache = torch.cuda.get_device_properties(0).L2_cache_size
    return max(2, min(64, -(-4 * cache // max(1, size))))


class AttentionCase:
    """One shape's pool in scattered pages, and the same keys and values in one piece for torch."""

    def __init__(self, shape: Shape, heads: tuple[int, int, int], dtype: torch.dtype) -> None:
        from surge_beam.gpu.triton_attention import TritonAttention

        self.shape, (self.heads, self.kv_heads, self.dim) = shape, heads
        self.context = shape.prefix + shape.own
        shared = shape.prefix // PAGE_SIZE
        own = -(-(shape.own + shape.new) // PAGE_SIZE)
        pages = shared + shape.sequences * own
        place = np.random.default_rng(0).permutation(pages)
        self.tables = [
            np.concatenate([place[:shared], place[shared + s * own : shared + (s + 1) * own]])
            for s in range(shape.sequences)
        ]
        size = 2 * self.kv_heads * pages * PAGE_SIZE * self.dim * dtype.itemsize
        self.layers = layers_beyond_cache(size)
        options: dict[str, Any] = {"dtype": dtype, "device": "cuda"}
        self.pool = torch.randn(
            self.layers, 2, self.kv_heads, pages * PAGE_SIZE, self.dim, **options
        )
        tokens = shape.sequences * shape.new
        self.query = torch.randn(tokens, self.heads, self.dim, **options)
        self.key, self.value = torch.randn(2, tokens, self.kv_heads, self.dim, **options)
        started = time.perf_counter()
        contexts, counts = [self.context] * shape.sequences, [shape.new] * shape.sequences
        groups = share_groups(self.tables, contexts, PAGE_SIZE)
        self.plan = plan_attention(self.tables, contexts, counts, PAGE_SIZE, groups=groups)
        planned = time.perf_counter()
        self.attention = TritonAttention(
            self.plan, self.pool[0, 0], heads=self.heads, scale=self.dim**-0.5
        )
        self.host_seconds = planned - started, time.perf_counter() - planned

    def ours(self, layer: int) -> Tensor:
        keys, values = self.pool[layer]
        return self.attention.run(keys, values, self.query, self.key, self.value)

    def contiguous(self) -> Tensor:
        """[layers, 2, sequences, kv_heads, keys, dim], new ones included; after ``ours``."""
        at = np.arange(self.context + self.shape.new)
        slots = np.stack([t[at // PAGE_SIZE] * PAGE_SIZE + at % PAGE_SIZE for t in self.tables])
        index = torch.from_numpy(slots.reshape(-1)).cuda()
        size = 2 * self.kv_heads * slots.size * self.dim * self.pool.element_size()
        layers = min(self.layers, layers_beyond_cache(size))
        shape = (layers, 2, slots.shape[0], self.kv_heads, slots.shape[1], self.dim)
        copy = self.pool.new_empty(shape)
        for layer in range(layers):
            for side in range(2):
                found = self.pool[layer, side].index_select(1, index).unflatten(1, slots.shape)
                copy[layer, side].copy_(found.transpose(0, 1))
        return copy

    def torchs(self, contiguous: Tensor) -> Callable[[int], Tensor]:
        shape = self.shape
        q = self.query.view(shape.sequences, shape.new, self.heads, self.dim).transpose(1, 2)
        mask = None
        if self.context and shape.new > 1:
            mask = torch.ones(shape.new, contiguous.shape[4], dtype=torch.bool, device="cuda")
            mask = mask.tril(self.context)

        def call(layer: int) -> Tensor:
            keys, values = contiguous[layer]
            return F.scaled_dot_product_attention(
                q,
                keys,
                values,
                attn_mask=mask,
                is_causal=mask is None and shape.new > 1,
                enable_gqa=True,
            )

        return call


def attention_rows(dtype: torch.dtype, bandwidth: float) -> Iterator[list[Any]]:
    for heads in HEADS:
        for shape in SHAPES:
            say(f"attention: {shape}, {heads}")
            case = AttentionCase(shape, heads, dtype)
            ours = seconds(case.ours, case.layers)
            contiguous = case.contiguous()
            torchs = case.torchs(contiguous)
            expected = torchs(0).transpose(1, 2).reshape(len(case.query), -1)
            error = (case.ours(0).float() - expected.float()).abs().max() / expected.abs().max()
            peer = seconds(torchs, len(contiguous))
            read = case.plan.kv_tokens_read * case.kv_heads * case.dim * 2 * dtype.itemsize
            pairs = sum(case.context + 1 + i for i in range(shape.new)) * shape.sequences
            flops = 4 * pairs * case.heads * case.dim
            yield [
                shape.name,
                f"{heads[0]}/{heads[1]} x {heads[2]}",
                shape.sequences,
                shape.prefix,
                shape.own,
                shape.new,
                ours * 1e6,
                peer * 1e6,
                peer / ours,
                100 * read / ours / bandwidth,
                flops / ours / 1e12,
                float(error),
                sum(case.host_seconds) * 1e6,
            ]
            del case, contiguous, torchs, expected
            torch.cuda.empty_cache()


def elementwise_rows(dtype: torch.dtype, bandwidth: float) -> Iterator[list[Any]]:
    """Each kernel beside torch's operations for the same, on decode and prefill rows."""
    from surge_beam.gpu.kernels.elementwise_triton import (
        add_rms_norm,
        rope_and_append,
        silu_and_mul,
    )
    from surge_beam.gpu.models.rope import Rope, default_frequencies, rotate

    for heads, kv_heads, dim, width, inner, _ in WIDTHS:
        for tokens in (64, 4096):
            options: dict[str, Any] = {"dtype": dtype, "device": "cuda"}
            size = tokens * width * dtype.itemsize
            layers = layers_beyond_cache(2 * size)
            x, residual = torch.randn(2, layers, tokens, width, **options)
            weight = torch.randn(width, **options)

            def norm(i: int, x: Tensor = x, r: Tensor = residual, w: Tensor = weight) -> Any:
                return F.rms_norm(x[i].add_(r[i]), (len(w),), w, 1e-5)

            def our_norm(i: int, x: Tensor = x, r: Tensor = residual, w: Tensor = weight) -> Any:
                return add_rms_norm(x[i], r[i], w, 1e-5)

            yield _pair("add and norm", tokens, width, our_norm, norm, layers, 4 * size, bandwidth)

            size = tokens * inner * dtype.itemsize
            layers = layers_beyond_cache(2 * size)
            gate_up = torch.randn(layers, tokens, 2 * inner, **options)

            def gated(i: int, x: Tensor = gate_up) -> Any:
                gate, up = x[i].chunk(2, dim=1)
                return F.silu(gate) * up

            def our_gated(i: int, x: Tensor = gate_up) -> Any:
                return silu_and_mul(x[i])

            yield _pair(
                "silu and mul", tokens, inner, our_gated, gated, layers, 3 * size, bandwidth
            )

            count = heads + 2 * kv_heads
            size = tokens * count * dim * dtype.itemsize
            layers = layers_beyond_cache(2 * size)
            qkv = torch.randn(layers, tokens, count * dim, **options)
            pool = torch.empty(layers, 2, kv_heads, tokens, dim, **options)
            slots = torch.randperm(tokens, device="cuda")
            positions = torch.arange(tokens, device="cuda")
            turns = Rope(default_frequencies(10_000.0, dim)).tables(positions, dtype)

            def rope(
                i: int,
                qkv: Tensor = qkv,
                pool: Tensor = pool,
                slots: Tensor = slots,
                turns: tuple[Tensor, Tensor] = turns,
                sizes: tuple[int, int, int] = (heads, kv_heads, dim),
            ) -> Any:
                q, k, v = qkv[i].view(len(slots), -1, sizes[2]).split((*sizes[:2], sizes[1]), 1)
                pool[i, 0].index_copy_(1, slots, rotate(k, *turns).transpose(0, 1))
                pool[i, 1].index_copy_(1, slots, v.transpose(0, 1))
                return rotate(q, *turns)

            def our_rope(
                i: int,
                qkv: Tensor = qkv,
                pool: Tensor = pool,
                slots: Tensor = slots,
                turns: tuple[Tensor, Tensor] = turns,
                heads: int = heads,
            ) -> Any:
                return rope_and_append(qkv[i], *turns, slots, pool[i, 0], pool[i, 1], heads=heads)

            yield _pair(
                "rope and append", tokens, count * dim, our_rope, rope, layers, 2 * size, bandwidth
            )


def sampling_rows(bandwidth: float) -> Iterator[list[Any]]:
    from surge_beam.gpu.kernels.sampling_triton import argmax, draw

    for *_, vocabulary in WIDTHS:
        for rows in (1, 32, 128):
            size = rows * vocabulary * 4
            layers = layers_beyond_cache(size)
            logits = torch.randn(layers, rows, vocabulary, device="cuda")
            temperature = torch.full((rows,), 0.7, dtype=torch.float64, device="cuda")
            uniform = torch.rand(rows, dtype=torch.float64, device="cuda")

            def greedy(i: int, x: Tensor = logits) -> Any:
                return x[i].max(dim=1)

            def our_greedy(i: int, x: Tensor = logits) -> Any:
                return argmax(x[i])

            def drawn(
                i: int, x: Tensor = logits, t: Tensor = temperature, u: Tensor = uniform
            ) -> Any:
                edges = (x[i].double() / t[:, None]).softmax(1).cumsum(1)
                return torch.searchsorted(edges, u[:, None])

            def our_drawn(
                i: int, x: Tensor = logits, t: Tensor = temperature, u: Tensor = uniform
            ) -> Any:
                return draw(x[i], t, u)

            yield _pair("argmax", rows, vocabulary, our_greedy, greedy, layers, size, bandwidth)
            yield _pair("draw", rows, vocabulary, our_drawn, drawn, layers, 2 * size, bandwidth)


def _pair(
    name: str,
    rows: int,
    width: int,
    ours: Callable[[int], Any],
    torchs: Callable[[int], Any],
    layers: int,
    size: int,
    bandwidth: float,
) -> list[Any]:
    say(f"{name}: {rows} x {width}")
    our_time, peer = seconds(ours, layers), seconds(torchs, layers)
    share = 100 * size / our_time / bandwidth
    return [name, rows, width, our_time * 1e6, peer * 1e6, peer / our_time, share]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--json", help="raw figures go to this file")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("skipped: the kernels are measured on a CUDA device, and there is none")
        return
    dtype = getattr(torch, args.dtype)
    with torch.inference_mode():
        bandwidth = copy_bandwidth()
        name = torch.cuda.get_device_name(0)
        print(f"{name}, torch {torch.__version__}, {args.dtype}; a copy moves {bandwidth:.3g} B/s")
        attention = list(attention_rows(dtype, bandwidth))
        sizes = ["sequences", "prefix", "own", "new"]
        rates = ["us", "torch us", "torch / ours", "KV at % of copy", "TFLOP/s"]
        print("\nAttention, append and merge included; KV counted as often as the plan reads it\n")
        header = ["case", "heads", *sizes, *rates, "largest difference", "plan us"]
        print(table(header, attention), flush=True)
        others = [*elementwise_rows(dtype, bandwidth), *sampling_rows(bandwidth)]
        print("\nBetween the matrix products\n")
        header = ["kernel", "rows", "width", "us", "torch us", "torch / ours", "% of copy"]
        print(table(header, others), flush=True)
    save(args.json, {"device": name, "attention": attention, "others": others})


if __name__ == "__main__":
    main()
