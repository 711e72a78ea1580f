"""What judges runs: benchmark, report, simulator, waste; nothing below imports it."""
