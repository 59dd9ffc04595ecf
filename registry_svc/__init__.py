"""The registry: base models, immutable adapter versions, names, and the watch.

domain → repository/ (rows never leave it) → service/ (use cases) → servicer (RPCs) → server, main.
docs/walk-of-a-publish.md goes the way of one publish; cli/ is registryctl.
"""
