"""A policy: loading, adapters, half precision, features, likelihood."""
