"""What the commands of `hf-ext` run, called with words: errors are raised, and results returned."""

from importlib import import_module

from hf_ext.cli import COMMANDS

predict = import_module(COMMANDS["predict"][0]).main
embed = import_module(COMMANDS["embed"][0]).main
score_variants = import_module(COMMANDS["score-variants"][0]).main
evaluate = import_module(COMMANDS["evaluate"][0]).main
sample = import_module(COMMANDS["sample"][0]).main
resume = import_module(COMMANDS["resume"][0]).main
examine = import_module(COMMANDS["doctor"][0]).main
compare = import_module(COMMANDS["compare"][0]).main
