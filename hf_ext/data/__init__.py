"""Data: from files and Hub datasets to clean, labelled and split rows; every refusal names file, row and column."""
