"""Common to all tests. Being here, it also makes the package ``support`` importable for them."""
