"""Masked-language-model training: arguments, building model, collator and trainer, and scoring."""
