"""The demo's stack on the default ports, in the foreground, with a registry that stays.

make serve           registry 127.0.0.1:50051, engine 127.0.0.1:50052, metrics 9400 and 9401
"""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from examples.demo_stack import ROOT, Stack, StackFailed, convert_model


def main() -> int:
    """Extra arguments go to the engine."""
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        with Stack(ROOT / ".loraplex" / "serve") as stack:
            convert_model()
            registry = stack.start_registry()
            stack.add_base_model()
            stack.publish()
            engine = stack.start_engine(*sys.argv[1:])
            print(f"registry {registry}, engine {engine.address()}; Ctrl-C ends both", flush=True)
            while (ended := stack.ended()) is None:
                time.sleep(0.5)
            raise StackFailed(f"{ended.name} ended:\n{ended.tail()}")
    except StackFailed as failure:
        print(f"serve: {failure}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 0


def _interrupt(number: int, _frame: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
