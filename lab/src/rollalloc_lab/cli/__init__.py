"""The command line of the laboratory, `rollalloc-lab`."""
