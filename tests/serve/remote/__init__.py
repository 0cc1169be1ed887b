"""Tests of fulgurite/serve/remote."""
