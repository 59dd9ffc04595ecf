"""The front door: everything that a clone can do, with nothing but Python's standard library.

    python3 dev.py demo | serve | test | test-slow | lint | stubs | dist | bench-NAME | env | clean

This file stays readable by old Pythons, so that they can say that they are too old.
"""

import sys

OLDEST = (3, 11)
NEWEST = (3, 14)


def main():  # type: () -> int
    version = sys.version_info[:2]
    if not OLDEST <= version <= NEWEST:
        sys.stderr.write(_wrong_python(version) + "\n")
        return 2
    from tools.dev.tasks import run

    return run(sys.argv[1:])


def _wrong_python(version):  # type: (tuple[int, ...]) -> str
    """One line and the command that mends it."""
    import shutil

    target = sys.argv[1] if len(sys.argv) > 1 else "demo"
    says = f"Python {version[0]}.{version[1]} does not fit (3.11 … 3.14); run: "
    for minor in range(NEWEST[1], OLDEST[1] - 1, -1):
        name = f"python3.{minor}"
        if shutil.which(name):
            return f"{says}{name} dev.py {target}"
    return f"{says}apt-get install python3.11 python3.11-venv"


if __name__ == "__main__":
    sys.exit(main())
