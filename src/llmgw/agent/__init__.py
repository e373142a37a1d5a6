"""The node daemon and its gate."""
