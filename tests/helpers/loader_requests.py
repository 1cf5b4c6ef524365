"""What a trainer of one of several processes would ask for, without a trainer or another process."""

from types import SimpleNamespace

from torch.utils.data import DataLoader, SequentialSampler

from hf_ext.hardware import describe_hardware
from hf_ext.plan import Plan
from hf_ext.speedups import Decision, Run
from hf_ext.training.loader_request import LoaderRequest
from hf_ext.training.planned import PlannedRun
from hf_ext.training_args import FastTrainingArguments


def make_args(folder, rank=0, world_size=1, **given):
    """Arguments as process `rank` of `world_size` has them."""
    settings = {"use_cpu": True, "report_to": "none", "per_device_train_batch_size": 2, "seed": 3, **given}
    args = FastTrainingArguments(str(folder), **settings)
    places = {"process_index": rank, "world_size": world_size, "train_batch_size": args.train_batch_size}
    return SimpleNamespace(**vars(args), **places)


def make_planned(args, **settings):
    """A plan that applied the speed-ups of these names, with their settings."""
    decisions = [Decision(name, "I", "applied", "asked for", settings=given) for name, given in settings.items()]
    return PlannedRun(Plan(describe_hardware("cpu"), decisions), Run(args, None), keeps_records=False)


def make_request(rows, collator=list, **given):
    """A request of batches of two rows in the order of the data, with nothing to prepare."""

    def make_stock():
        return DataLoader(rows, 2, collate_fn=collator)

    asked = {"dataset": rows, "description": "Training", "batch_size": 2, "collator": collator, "stock": make_stock}
    asked |= {"sampler": SequentialSampler, "prepare": lambda loader: loader}
    asked |= {"remove_columns": lambda table, _: table, "bare_collator": lambda collator, _: collator}
    return LoaderRequest(**{**asked, **given})
