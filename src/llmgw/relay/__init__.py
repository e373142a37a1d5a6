"""Pipes: the asyncio HTTP relay that router and gate share."""
