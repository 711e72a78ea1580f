"""The leaderboard: methods × tasks under a plan that is fixed before any run, and its tables."""
