"""Units, tables and progress: how numbers are written, for every floor above."""
