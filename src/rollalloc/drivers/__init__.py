"""Adapters to other trainers. Only these modules import the frameworks."""
