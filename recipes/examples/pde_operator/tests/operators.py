"""Samples of both equations at a resolution of 16, and an operator of 8,000 parameters or so."""

from pde_operator.configuration import OperatorConfig
from pde_operator.data import make_task, measure_units
from pde_operator.model import OperatorTransformer

RESOLUTION = 16
TASKS = ["advection1d", "darcy2d"]


def make_samples(num: int, split: str = "train"):
    """task -> {"inputs", "targets"}."""
    return {task: make_task(task, split, num, resolution=RESOLUTION, seed=0) for task in TASKS}


def make_operator(**given) -> OperatorTransformer:
    shape = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 4}
    settings = {**shape, "tasks": TASKS, "resolution": RESOLUTION, **measure_units(make_samples(8)), **given}
    return OperatorTransformer(OperatorConfig(**settings))
