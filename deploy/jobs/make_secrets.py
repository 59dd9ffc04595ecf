"""Write the stack's secrets into a folder, once: random ones, or those of the environment.

    python make_secrets.py /secrets

POSTGRES_PASSWORD, S3_ACCESS_KEY and S3_SECRET_KEY are taken where they are set and not empty.
A folder that has secrets is left alone: the database and the object store were made with them.

    postgres/password         read by the PostgreSQL image
    s3/s3.json                SeaweedFS's identities
    loraplex/pgpass           PGPASSFILE of registry and jobs
    loraplex/aws_credentials  AWS_SHARED_CREDENTIALS_FILE of registry, engine and jobs
"""

from __future__ import annotations

import json
import os
import secrets
import sys
from collections.abc import Mapping
from pathlib import Path

DONE = "complete"


def main(folder: Path, environ: Mapping[str, str]) -> int:
    if (folder / DONE).exists():
        print(f"{folder}: secrets are kept as they are")
        return 0
    password = environ.get("POSTGRES_PASSWORD") or secrets.token_hex(20)
    access_key = environ.get("S3_ACCESS_KEY") or secrets.token_hex(10)
    secret_key = environ.get("S3_SECRET_KEY") or secrets.token_hex(20)
    identity = {
        "name": "loraplex",
        "credentials": [{"accessKey": access_key, "secretKey": secret_key}],
        "actions": ["Admin", "Read", "List", "Tagging", "Write"],
    }
    credentials = (
        f"[default]\naws_access_key_id = {access_key}\naws_secret_access_key = {secret_key}\n"
    )
    # Other images read theirs as users of their own; ours are for our user alone.
    _write(folder / "postgres" / "password", password, 0o444)
    _write(folder / "s3" / "s3.json", json.dumps({"identities": [identity]}), 0o444)
    _write(folder / "loraplex" / "pgpass", f"*:*:*:loraplex:{password}\n", 0o600)
    _write(folder / "loraplex" / "aws_credentials", credentials, 0o600)
    _write(folder / DONE, "", 0o444)
    print(f"{folder}: secrets written")
    return 0


def _write(path: Path, text: str, mode: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(number, "w") as file:
        file.write(text)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), os.environ))
