"""Tools that judge runs: benchmark, report, simulator, waste, advice. Nothing below this package imports it."""
