"""Base linears of few rows: cuBLAS against kernels.few_rows_linear, by site and as whole layers.

    python -m benchmarks.few_rows

A site: replays of a graph of 8 weights, each product followed by an elementwise kernel as in a
step. Every output is compared with torch's first. Records nothing; on a CPU a dry run.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.replays import measure
from engine_svc.model.gpu.launches import trunk_launches
from kernels.few_rows_linear import MAX_ROWS, FewRowsScratch, few_rows_linear
from kernels.few_rows_linear_triton import (
    CANDIDATES,
    CANDIDATES_FEW,
    DOT_ROWS,
    FewRowsTuning,
    few_rows_linear_triton,
)

ROWS = (1, 8, 32, 64)
LAYERS, REPLAYS = 8, 9
#: (columns, inputs) of qkv, o, gate_up, down
SITES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
TINY_SITES = {"qkv": (96, 64), "o": (64, 64), "gate_up": (224, 64), "down": (64, 112)}
TOLERANCE = 1e-2
#: of a copy on an H200
BYTES_PER_US = 4.23e6
#: (x, weight, out)
Linear = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]


@dataclass
class Bench:
    device: torch.device
    sites: dict[str, tuple[int, int]]
    weights: dict[str, list[torch.Tensor]]

    def site(self, name: str, rows: int, linear: Linear) -> Callable[[], None]:
        columns, inputs = self.sites[name]
        x = self._random(rows, inputs)
        out = torch.empty((rows, columns), dtype=x.dtype, device=self.device)
        width = min(columns, inputs)
        residual, normed = self._random(rows, width), self._random(rows, width)
        norm = self._random(1, width)[0]
        launch = trunk_launches(x, overlap=True)

        def run() -> None:
            for weight in self.weights[name]:
                linear(x, weight, out)
                launch.add_rms_norm(out[:, :width], residual, norm, 1e-5, normed, None)

        return run

    def layers(self, rows: int, linears: dict[str, Linear]) -> Callable[[], None]:
        """Each site and the elementwise kernel behind it, without attention."""
        hidden, inner = self.sites["qkv"][1], self.sites["down"][1]
        x, residual = self._random(rows, hidden), self._random(rows, hidden)
        qkv, gate_up, projected, inside = (
            torch.empty((rows, width), dtype=x.dtype, device=self.device)
            for width in (self.sites["qkv"][0], 2 * inner, hidden, inner)
        )
        norm = self._random(1, hidden)[0]
        launch = trunk_launches(x, overlap=True)

        def run() -> None:
            for index in range(len(self.weights["qkv"])):
                at = {name: weights[index] for name, weights in self.weights.items()}
                linears["qkv"](x, at["qkv"], qkv)
                launch.add_rms_norm(qkv[:, :hidden], residual, norm, 1e-5, x, None)
                linears["o"](x, at["o"], projected)
                launch.add_rms_norm(projected, residual, norm, 1e-5, x, None)
                linears["gate_up"](x, at["gate_up"], gate_up)
                launch.silu_mul_delta(gate_up, inside, None)
                linears["down"](inside, at["down"], projected)
                launch.add_rms_norm(projected, residual, norm, 1e-5, x, None)

        return run

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device=self.device).normal_()


def cublas(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> object:
    return torch.mm(x, weight.t(), out=out)


def ours(tuning: FewRowsTuning, on_gpu: bool, pdl: bool = True) -> Linear:
    if not on_gpu:
        return few_rows_linear
    size = max(MAX_ROWS * columns for columns, _ in SITES.values())
    scratch = FewRowsScratch(
        torch.empty(tuning.splits * size, device="cuda"),
        torch.zeros(4096, dtype=torch.int32, device="cuda"),
    )
    return lambda x, weight, out: few_rows_linear_triton(
        x, weight, out, scratch, tuning=tuning, pdl=pdl
    )


def wrong(bench: Bench, linear: Linear, rows: int) -> float:
    worst = 0.0
    for name, (columns, inputs) in bench.sites.items():
        x = bench._random(rows, inputs)
        out = torch.full((rows, columns), torch.nan, dtype=x.dtype, device=bench.device)
        linear(x, bench.weights[name][0], out)
        expected = x.float() @ bench.weights[name][0].float().t()
        error = float((out.float() - expected).norm() / expected.norm())
        worst = max(worst, error if error == error else 1.0)
    return worst


def main() -> int:
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    sites = SITES if on_gpu else TINY_SITES
    weights = {
        name: [
            torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(0, 0.02)
            for _ in range(LAYERS)
        ]
        for name, shape in sites.items()
    }
    bench = Bench(device, sites, weights)
    for rows in ROWS:
        right = {}
        for tuning in CANDIDATES_FEW if rows <= DOT_ROWS else CANDIDATES:
            error = wrong(bench, ours(tuning, on_gpu), rows)
            if error < TOLERANCE:
                right[str(tuning)] = ours(tuning, on_gpu)
            else:
                print(f"{rows} rows: FAIL, relative error {error:.1e} with {tuning}")
        best: dict[str, Linear] = {}
        either: dict[str, Linear] = {}
        for name, (columns, inputs) in sites.items():
            versions = {key: bench.site(name, rows, linear) for key, linear in right.items()}
            versions["cuBLAS"] = bench.site(name, rows, cublas)
            times = measure(versions, REPLAYS, device)
            us = {key: statistics.median(of) / LAYERS * 1e6 for key, of in times.items()}
            floor, library = 2 * columns * inputs / BYTES_PER_US, us.pop("cuBLAS")
            print(f"{rows} rows, {name}: cuBLAS {library:.2f} µs, floor {floor:.2f}")
            for key, value in sorted(us.items(), key=lambda item: item[1])[:3]:
                print(f"    {value:7.2f}  {key}")
            fastest = min(us, key=us.__getitem__)
            best[name] = right[fastest]
            either[name] = right[fastest] if us[fastest] < library else cublas
        kinds: dict[str, dict[str, Linear]] = {
            "cuBLAS": dict.fromkeys(sites, cublas),
            "ours": best,
            "the faster": either,
        }
        layers = {kind: bench.layers(rows, linears) for kind, linears in kinds.items()}
        times = measure(layers, REPLAYS, device)
        shown = {kind: round(statistics.median(of) / LAYERS * 1e6, 1) for kind, of in times.items()}
        print(f"{rows} rows, a layer without attention, µs: {shown}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
