"""Rules that several recipes share: frozen values, one slot of a recipe in each file."""
