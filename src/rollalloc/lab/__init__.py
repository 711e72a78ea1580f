"""Tools that judge runs: benchmark, report, simulator, waste, advice. Lower layers do not import this package."""
