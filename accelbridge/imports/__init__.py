"""Recipes made from the configuration files of other trainers."""
