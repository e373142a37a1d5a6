"""Readers of foreign bytes: bytes in, values or our own error out."""
