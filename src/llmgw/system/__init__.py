"""Hands: the only code that runs programs, opens sockets and writes files."""
