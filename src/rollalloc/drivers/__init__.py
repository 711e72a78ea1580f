"""Thin adapters to other people's trainers: they translate, the core decides."""
