from setuptools import find_packages, setup

# Everything else about the project is in pyproject.toml.
# Files to launch with or copy: folders at the top of a clone, which a wheel has inside hf_ext (`hf-ext --path NAME`).
SHIPPED = {
    "hf_ext.recipes.configs": "recipes/configs",
    "hf_ext.accelerate_configs": "accelerate_configs",
    "hf_ext.launch": "launch",
}
DOCS = ["sphinx>=8.1", "myst-parser>=4", "furo>=2025.7"]

setup(
    packages=[*find_packages(include=["hf_ext", "hf_ext.*"]), *SHIPPED],
    package_dir=SHIPPED,
    include_package_data=False,  # else all that MANIFEST.in has for the source archive
    package_data={
        "hf_ext": ["py.typed", "hardware.csv"],
        "hf_ext.reporting": ["templates/*"],
        "hf_ext.recipes.configs": ["*.yaml"],
        "hf_ext.accelerate_configs": ["*.yaml"],
        "hf_ext.launch": ["*.sbatch", "*.sh", "*.yaml"],
    },
    install_requires=[
        "torch>=2.11,<2.16",
        "transformers>=5.24,<6",
        "accelerate>=1.15",
        "datasets>=5.1",  # before, the second pass of a stream after skip() or take() is an error
        "peft>=0.21",  # `model.add_adapter` of transformers 5.24 asks for 0.22, which is not out; `PeftModel` works
        "evaluate>=0.4.6",
        "faesm>=0.1.1",
        "huggingface_hub>=1",
        "safetensors>=0.8",
        "numpy>=2",
        "pandas>=2.2",
        "pyarrow>=18",
        "pyyaml>=6",
        "rapidfuzz>=3.14",  # edit distances in C++ without dependencies of its own: near copies, families, leaks
        "scipy>=1.13",
        "matplotlib>=3.9",
        "sentencepiece>=0.2",  # IgT5's and ProtT5's tokenizers are sentencepiece models
        "protobuf>=4",
        "tqdm>=4.66",
        "jinja2>=3.1",  # the pages of a run: report and card; torch brings it too
        "psutil>=5.9",  # when a process began: how old the session is, who holds a folder
        "filelock>=3.30",  # `SoftFileLease`: one run per folder, taken over from a killed process or machine
    ],
    extras_require={
        "flash": ["flash-attn>=2.7"],
        "deepspeed": ["deepspeed>=0.19"],
        "torchao": ["torchao>=0.18"],
        "nvml": ["nvidia-ml-py>=12"],  # how busy a GPU is
        "h5": ["h5py>=3.12"],  # of `hf-ext embed` and --embeddings; no other command needs HDF5
        "quantization": ["bitsandbytes>=0.50"],  # the first whose 8-bit optimizers step on a CPU, where we test
        # hf-ext export: what transformers' exporter needs, and what checks its file. Not in dev: 120 MB on disk.
        "onnx": ["onnx>=1.21", "onnxscript>=0.7", "onnxruntime>=1.24"],
        "docs": DOCS,
        "dev": [
            *DOCS,
            *("pytest>=8", "pytest-timeout>=2.3", "pytest-xdist>=3.6", "ruff>=0.14", "mypy>=1.18", "types-PyYAML"),
            *("nbclient>=0.10", "nbformat>=5.10", "ipykernel>=6.29"),  # the notebook is executed by a test
            "optuna>=4.5",  # a hyperparameter search is tested against that of stock Trainer
            "tensorboard>=2.18",  # what report_to writes is read back by a test
            "bitsandbytes>=0.50",
            "h5py>=3.12",  # recipes/examples/pde_operator reads PDEBench's files, and files of vectors are tested
            *("build>=1.2", "setuptools>=77"),  # a test builds wheel and sdist with what is installed
        ],
    },
)
