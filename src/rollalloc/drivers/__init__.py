"""Thin adapters to other trainers. Only these modules import the frameworks."""
