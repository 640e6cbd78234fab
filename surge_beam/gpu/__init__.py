"""The worker: the only place that imports torch, triton or vllm."""

import os

# Read when torch loads. Threads that spin long at barriers starve reading and writing of the cores;
# threads that sleep at once make a step of a small model a third slower. This is some 10 us.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "5000")
