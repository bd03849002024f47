"""Integrations with training frameworks, which multibn itself never imports."""
