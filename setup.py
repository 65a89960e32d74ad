"""Everything that describes the package; pyproject.toml only configures the tools around it."""

from pathlib import Path

from setuptools import find_packages, setup

setup(
    name="fairseq_node",
    version="0.1.0",
    description="N-ODE Transformers: Transformers with continuous depth, as a plugin for fairseq",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author="fairseq_node contributors",
    license="MIT",
    license_files=["LICENSE"],
    classifiers=[
        "Intended Audience :: Science/Research",
        "Programming Language :: Python :: 3.9",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
    packages=find_packages(include=["fairseq_node", "fairseq_node.*"]),
    python_requires=">=3.9,<3.13",
    install_requires=[
        # fairseq's own last release fails to import on Python 3.11: its dataclasses have mutable
        # defaults. fairseq-fixed is the same package with these repaired, for 3.11 and newer only.
        # Exact, since we extend their classes and each build is a last release.
        'fairseq==0.12.2; python_version < "3.11"',
        'fairseq-fixed==0.12.3.1; python_version >= "3.11"',
        "numpy",
        "sacrebleu>=2",
        "sentencepiece",
        "torch>=2.1",
        "torchdiffeq>=0.2.3",
    ],
    extras_require={
        "data": ["mtdata", "num2words", "requests"],
        "plots": ["matplotlib"],
        "test": [
            "hypothesis",
            "matplotlib",
            "mtdata",
            "num2words",
            "pytest>=7",
            "pytest-xdist>=3.2",  # the first with --dist worksteal
            "requests",
            "ruff",
            "tensorboardX",
            "torchode",
        ],
    },
)
