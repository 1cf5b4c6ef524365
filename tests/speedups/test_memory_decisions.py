"""What the plan says of the ladder and of the finder, on described machines."""

from types import SimpleNamespace

from hf_ext.hardware import describe_hardware
from hf_ext.speedups import Context, DataFacts, Run, find_batch_size
from hf_ext.training_args import FastTrainingArguments


def context(world_size=1, streaming=False, **given):
    args = FastTrainingArguments(output_dir="o", use_cpu=True, report_to="none", **given)
    return Context(describe_hardware("t4"), args, data=DataFacts(100, streaming=streaming), world_size=world_size)


def test_a_loss_that_compares_rows_is_refused_and_one_of_the_users_changes_the_class():
    decision = find_batch_size.decide(context(find_batch_size=True))
    ranking = SimpleNamespace(config=SimpleNamespace(loss="ranking"))
    refused = find_batch_size.apply(decision, Run(None, ranking))
    assert refused.status == "refused"
    assert "compares the rows" in refused.reason
    changed = find_batch_size.apply(decision, Run(None, None, own_loss="Mine.compute_loss"))
    assert (changed.status, changed.kind) == ("applied", "L")
    assert find_batch_size.apply(decision, Run(None, None)) == decision
