"""The GPU's way through a step: static buffers, one trunk, captured graphs. See runner.py."""
