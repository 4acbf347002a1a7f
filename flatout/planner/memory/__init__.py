"""Estimate a step's memory, and choose settings that fit."""
