"""The only torch of the engine: arch, weights, attention, LoRA, arena bytes, sampler, runner."""

import os

# libgomp reads this once, when torch is imported: threads that wait for each other sleep after a
# short spin instead of holding a core that a frontend or the loader needs. Measured on 2 cores with
# a load of 7, 8 decodes a step of SmolLM2-135M, two runs: 0.09 and 0.29 s with it, 1.0 and 2.8 s
# without.
os.environ.setdefault("GOMP_SPINCOUNT", "2000")
