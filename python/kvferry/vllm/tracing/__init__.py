"""OpenTelemetry traces of requests, over both engines."""
