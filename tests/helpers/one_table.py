"""A source of data as one table, the parts of a folder or of a Hub dataset one after the other."""

from datasets import concatenate_datasets

from hf_ext.data.reading import read_parts


def read_table(name, columns=None, **options):
    return concatenate_datasets([part.data for part in read_parts(name, columns, **options)])
