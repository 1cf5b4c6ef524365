"""What makes a step fit into memory: the rows of a pass that fit, and a step that did not, made again."""
