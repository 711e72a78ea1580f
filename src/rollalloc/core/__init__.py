"""The decision core: numpy only, no I/O, clock, logging, threads or torch."""
