"""Register the demo's base model and its three adapters at the registry.

    python publish.py MODEL_DIR ADAPTERS_DIR

The registry's address comes from LORAPLEX_REGISTRY_ADDRESS. Doing it again changes nothing.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

MODEL_ALIAS = "HuggingFaceTB/SmolLM2-135M-Instruct"


def main(model_dir: Path, adapters_dir: Path) -> int:
    base = model_dir.name
    commands = [["base-model", "add", base, "--from", str(model_dir), "--alias", MODEL_ALIAS]]
    for folder in sorted(path for path in adapters_dir.iterdir() if path.is_dir()):
        commands.append(["register", folder.name, str(folder), "--base-model", base])
    for command in commands:
        print("registryctl", *command, flush=True)
        done = subprocess.run(
            [sys.executable, "-m", "registry_svc.cli.main", *command], check=False
        )
        if done.returncode != 0:
            return done.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
