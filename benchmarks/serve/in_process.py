"""The engine's core without anything around it, in a process of its own: `bench-serve` starts this
to learn what a load would bring without frontends. Prints one JSON object on its last line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.shared.core_drive import SLOTS_A_PLACE, CoreDriver, core_limits
from benchmarks.shared.packed_adapters import AdapterRegion, MemoryFile
from engine_svc.model.build import ModelOptions, load_model


def main(argv: Sequence[str] | None = None) -> int:
    options = _options(argv)
    memory = MemoryFile()
    try:
        model = load_model(
            options.model,
            ModelOptions(
                host_region_path=str(memory.path),
                device=options.device,
                arena_bytes=options.arena_bytes,
                max_slots=options.max_loras * SLOTS_A_PLACE,
                max_num_seqs=options.max_num_seqs,
                max_num_batched_tokens=options.max_num_batched_tokens,
                context_tokens=options.max_model_len,
                load_format="dummy",
            ),
        )
        region = AdapterRegion(memory.path, model.base, model.layout)
        refs = [one.ref for one in region.write((options.rank,) * options.adapters)]
        # as an engine has it by default: no two prompts here are equal
        limits = core_limits(
            model, options.max_loras, options.max_num_seqs, options.max_num_batched_tokens,
            prefix_cache=True,
        )  # fmt: skip
        core = CoreDriver(model, limits, region)
        asked = [refs[i % len(refs)] if refs else None for i in range(options.streams)]
        core.run(asked, options.prompt, options.output)
        runs = [core.run(asked, options.prompt, options.output) for _ in range(options.rounds)]
        model.slot_writer.close()
    finally:
        memory.close()
    steps = [one for run in runs for one in run.tpot_s]
    found = {
        "tokens_per_s": [run.tokens_per_s for run in runs],
        "step_ms": 1e3 * statistics.median(steps) if steps else None,
    }
    print(json.dumps(found), flush=True)
    return 0


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--device", default="auto")
    for name, default in (
        ("arena-bytes", 0), ("max-loras", 32), ("max-num-seqs", 256),
        ("max-num-batched-tokens", 8192), ("max-model-len", 0), ("adapters", 0), ("rank", 16),
        ("streams", 256), ("prompt", 32), ("output", 512), ("rounds", 2),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
