"""How torch's threads wait for each other. Nothing of torch is imported here."""

from __future__ import annotations

from collections.abc import Mapping


def quiet_threads(environ: Mapping[str, str]) -> dict[str, str]:
    """What torch's threads must find in their environment before torch is loaded.

    By default OpenMP's threads spin while they wait for each other. On cores that other processes
    use too, that burns the time of the very thread they wait for. 120 products of 1x576 by
    576x1536 on two threads, ms on two idle cores and on two that others use:

        default 15.0, 325-1877    spin count 1000: 15.5, 80-152    passive 18.9, 67-113
    """
    if "OMP_WAIT_POLICY" in environ or "GOMP_SPINCOUNT" in environ:
        return {}
    return {"GOMP_SPINCOUNT": "1000"}
