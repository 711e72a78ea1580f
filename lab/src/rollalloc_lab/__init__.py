"""The laboratory of rollalloc: task families, leaderboard and simulator. The library does not import it."""
