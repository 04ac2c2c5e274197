"""Reads from engines that run vLLM's own NixlConnector, which cannot confirm."""
