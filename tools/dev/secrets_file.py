""".env for docker compose: random secrets, written once."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

NAMES = ("POSTGRES_PASSWORD", "S3_ACCESS_KEY", "S3_SECRET_KEY")


def write(path: Path) -> int:
    """Create the file with mode 0600; one that exists is kept, volumes depend on it."""
    text = "".join(f"{name}={secrets.token_hex(20)}\n" for name in NAMES)
    try:
        number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        print(f"{path} is kept as it is")
        return 0
    with os.fdopen(number, "w") as file:
        file.write(text)
    print(f"{path} written")
    return 0
