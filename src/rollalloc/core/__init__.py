"""The core that decides. It needs only numpy: no I/O, no clock, no logging, no threads, no torch."""
