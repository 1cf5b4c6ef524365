"""How arguments are given: names, checks, presets, YAML files, the command line and its help page."""
