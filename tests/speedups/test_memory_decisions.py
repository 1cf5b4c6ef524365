"""What the plan says of the ladder and of the finder, on described machines."""

from types import SimpleNamespace

import pytest

from hf_ext.hardware import describe_hardware
from hf_ext.speedups import Context, DataFacts, FindBatchSize, OomLadder, Run
from hf_ext.training_args import FastTrainingArguments


def context(world_size=1, streaming=False, **given):
    args = FastTrainingArguments(output_dir="o", use_cpu=True, report_to="none", **given)
    return Context(describe_hardware("t4"), args, data=DataFacts(100, streaming=streaming), world_size=world_size)


def decide(module, **given):
    decision = module.decide(context(**given))
    return decision.status, decision.reason


def test_the_ladder_is_off_unless_asked_for():
    assert decide(OomLadder) == ("off", "not asked for")
    assert decide(OomLadder, oom_policy="step_down", without=["oom_ladder"])[0] == "off"
    assert decide(OomLadder, oom_policy="step_down")[0] == "applied"


def test_presets_take_the_ladder_on_one_process_and_on_several_the_users_word_is_refused():
    assert decide(OomLadder, preset="max_speed")[0] == "applied"
    assert decide(OomLadder, preset="low_memory")[0] == "applied"
    assert decide(OomLadder, preset="baseline")[0] == "off"
    status, reason = decide(OomLadder, preset="max_speed", world_size=2)
    assert status == "skipped"
    assert "--find_batch_size" in reason
    assert decide(OomLadder, preset="max_speed", oom_policy="step_down", world_size=2)[0] == "refused"


@pytest.mark.parametrize("module", [OomLadder, FindBatchSize])
def test_contradictions_are_refused(module):
    given = {"oom_policy": "step_down", "find_batch_size": True, "auto_find_batch_size": True}
    status, reason = decide(module, **given)
    assert status == "refused"
    assert "leave it out" in reason


def test_the_finder():
    assert decide(FindBatchSize) == ("off", "not asked for")
    assert decide(FindBatchSize, find_batch_size=True)[0] == "applied"
    assert decide(FindBatchSize, find_batch_size=True, streaming=True)[0] == "refused"
    assert decide(FindBatchSize, find_batch_size=True, max_tokens_per_batch=100)[0] == "refused"


def test_a_loss_that_compares_rows_is_refused_and_one_of_the_users_changes_the_class():
    decision = FindBatchSize.decide(context(find_batch_size=True))
    ranking = SimpleNamespace(config=SimpleNamespace(loss="ranking"))
    refused = FindBatchSize.apply(decision, Run(None, ranking))
    assert refused.status == "refused"
    assert "compares the rows" in refused.reason
    changed = FindBatchSize.apply(decision, Run(None, None, own_loss="Mine.compute_loss"))
    assert (changed.status, changed.kind) == ("applied", "L")
    assert FindBatchSize.apply(decision, Run(None, None)) == decision
