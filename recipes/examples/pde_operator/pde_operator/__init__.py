"""The PDE task: two operators, 1-D advection and 2-D Darcy flow, learned by one Transformer from generated data."""
