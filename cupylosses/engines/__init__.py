"""Engines: each turns a call of its losses into a plan, and a plan into kernel launches."""
