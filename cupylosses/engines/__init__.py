"""Engines. Each turns a call of one of its losses into a plan, and a plan into kernel launches."""
