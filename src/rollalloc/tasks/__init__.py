"""Tasks by name, on which recipes are compared: `skills`, `sort` and those of reasoning-gym."""
