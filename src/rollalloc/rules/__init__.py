"""The rules recipes are made of: frozen values, one family a file."""
