"""The command line; needs the extra `native`."""

try:
    import rich as _rich  # noqa: F401
    import typer as _typer  # noqa: F401
except ImportError as error:
    raise ImportError("the command rollalloc needs typer and rich; pip install 'rollalloc[native]'") from error
