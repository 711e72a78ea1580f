"""Thin adapters to trainers of others; each framework only here."""
