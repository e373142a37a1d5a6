"""Eyes: read this machine."""
