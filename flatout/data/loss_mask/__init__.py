"""Finds which tokens carry loss."""
