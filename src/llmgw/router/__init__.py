"""The data plane."""
