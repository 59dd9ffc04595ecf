"""`loraplex-engine`: read the settings, then supervise the engine's processes.

Prints one JSON line on standard output once every part serves; logs go to standard error.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from engine_svc.settings import SettingInvalid, load

EXIT_USAGE = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 after SIGTERM or SIGINT, 1 when the engine cannot run, 2 for a setting."""
    try:
        settings = load(sys.argv[1:] if argv is None else argv, os.environ)
        # --help and a wrong setting answer without loading what follows
        from engine_svc.processes.supervisor import Supervisor, announce_on_stdout

        return Supervisor(settings, announce_on_stdout).run()
    except SettingInvalid as error:
        print(f"loraplex-engine: {error}", file=sys.stderr)
        return EXIT_USAGE


if __name__ == "__main__":
    raise SystemExit(main())
