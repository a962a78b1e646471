"""Emulated links: network namespaces with shaped traffic, or relays without root rights."""
