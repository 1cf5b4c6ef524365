from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
VERSION = next(
    line.split('"')[1]
    for line in (ROOT / "hf_ext/__init__.py").read_text().splitlines()
    if line.startswith("__version__")
)

setup(
    name="hf_ext",
    version=VERSION,
    description="The Hugging Face Trainer for protein language models on the hardware you have.",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    packages=find_packages(include=["hf_ext", "hf_ext.*"]),
    package_data={"hf_ext.reporting.report": ["templates/*"]},
    python_requires=">=3.10",
    install_requires=[
        "torch>=2.11,<2.14",
        "transformers>=5.23,<6",
        "accelerate>=1.15",
        "datasets>=5",
        "peft>=0.21",
        "evaluate>=0.4.6",
        "faesm>=0.1.1",
        "huggingface_hub>=1",
        "safetensors>=0.8",
        "numpy>=2",
        "pandas>=2.2",
        "pyarrow>=18",
        "pyyaml>=6",
        "scipy>=1.13",
        "matplotlib>=3.9",
        "sentencepiece>=0.2",  # IgT5's and ProtT5's tokenizers are sentencepiece models
        "protobuf>=4",
        "tqdm>=4.66",
        "jinja2>=3.1",  # the page of the run report; torch brings it too
        "psutil>=5.9",  # when a process began: whether a lock is stale, and how old the session is
    ],
    extras_require={
        "flash": ["flash-attn>=2.7"],
        "deepspeed": ["deepspeed>=0.19"],
        "torchao": ["torchao>=0.18"],
        "quantization": ["bitsandbytes>=0.50"],  # the first whose 8-bit optimizers step on a CPU, where we test
        "numbering": ['anarcii>=2.0.8; python_version >= "3.11"'],  # antibodies as variable domains, IMGT
        "humanness": ["promb>=1.0.2"],  # OASis 9-mers of human antibodies
        "dev": [
            *("pytest>=8", "pytest-timeout>=2.3", "pytest-xdist>=3.6", "ruff>=0.14", "mypy>=1.18", "types-PyYAML"),
            *("nbclient>=0.10", "nbformat>=5.10", "ipykernel>=6.29"),  # the notebook is executed by a test
            "tensorboard>=2.18",  # what report_to writes is read back by a test
            "bitsandbytes>=0.50",
        ],
    },
)
