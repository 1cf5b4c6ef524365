"""Antibodies for an antigen: what is generated, and what is said about it."""
