"""Mediamill: asynchronous media processing behind a durable queue."""
