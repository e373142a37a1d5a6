"""Decisions: desired, observed and the time in, steps out."""
