from setuptools import find_packages, setup

setup(
    name="fairseq_node",
    version="0.1.0",
    description="Transformers with continuous depth for fairseq: the N-ODE Transformer",
    long_description=open("README.md", encoding="utf-8").read(),
    long_description_content_type="text/markdown",
    license="MIT",
    packages=find_packages(include=["fairseq_node", "fairseq_node.*"]),
    python_requires=">=3.9,<3.13",
    install_requires=[
        # fairseq 0.12.2 does not import on Python 3.11; its maintained build starts there.
        'fairseq==0.12.2; python_version < "3.11"',
        'fairseq-fixed==0.12.3.1; python_version >= "3.11"',
        "numpy",
        "sacrebleu",
        "sentencepiece",
        "torch>=2.1",
        "torchdiffeq",
    ],
    extras_require={
        "data": ["num2words"],
        "plots": ["matplotlib"],
        "test": ["hypothesis", "matplotlib", "num2words", "pytest", "ruff", "tensorboardX", "torchode"],
    },
)
