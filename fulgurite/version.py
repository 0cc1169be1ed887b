"""The version, in a file that can be read without importing torch."""

VERSION = "0.1.0"
