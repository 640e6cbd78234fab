"""Kernels for the devices: C++ for CPUs, Triton for GPUs."""
