"""Structured output: grammars of requests, compiled by llguidance to masks over the vocabulary."""
