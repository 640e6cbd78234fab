"""The worker: the only place that imports torch, triton or vllm."""

import os

# Read when torch loads. Threads that spin at barriers starve reading and writing of the cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
