"""How torch's threads wait for each other; loads no torch."""

from __future__ import annotations

import os


def wait_passively() -> None:
    """Lets threads sleep at barriers, unless OMP_WAIT_POLICY says otherwise.

    It is read when torch loads, so call this before. Threads that spin starve reading and writing
    of the cores.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
