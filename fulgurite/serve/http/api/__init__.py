"""Endpoints: one file a family. A request body in, JSON or server-sent events out."""
