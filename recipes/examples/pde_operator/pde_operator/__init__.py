"""A task outside of hf_ext: one Transformer learns two operators, 1-D advection and 2-D Darcy flow.

Its model loads again where this folder is on `sys.path`: `from pde_operator.model import OperatorTransformer`.
"""
