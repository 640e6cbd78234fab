"""Beam's workers install the package from this file, so it states ranges, never pins."""

from pathlib import Path

from setuptools import find_packages, setup

setup(
    name="surge_beam",
    version="0.1.0",
    description="Apache Beam transforms that stream partitioned text through encoders",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=find_packages(include=["surge_beam", "surge_beam.*"]),
    package_data={"surge_beam": ["py.typed"], "surge_beam.gpu.kernels": ["*.cpp", "*.h"]},
    install_requires=[
        "apache-beam>=2.76,<3",
        "fsspec>=2023.6",
        "jinja2>=3.1",
        "numpy>=1.24",
        "psutil>=5.9",
        "pyarrow>=16,<26",
        "xxhash>=3",
    ],
    # No extra names triton: a GPU worker's torch decides which one it takes.
    extras_require={
        "torch": [
            "huggingface-hub>=0.24",
            "ninja>=1.10",
            "safetensors>=0.4.3",
            "sentence-transformers>=3",
            "tokenizers>=0.19",
            "torch>=2.2",
            "transformers>=4.41",
        ],
        "gguf": ["gguf>=0.10"],
        "vllm": ["vllm"],
        "s3": ["s3fs"],
        "gcs": ["gcsfs"],
        "plots": ["matplotlib"],
    },
)
