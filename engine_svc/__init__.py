"""The engine: one base model, many adapters, streams over gRPC.

Read types.py, then core/engine.py; docs/walk-of-a-request.md goes the way of one request.

types       the vocabulary: one frozen type for each border
compose     the composition root, where the four siblings meet:
frontend/   gRPC and text        core/    who runs when, with which pages
adapters/   names and weights    model/   tensors
processes/  the process tree; messages are what crosses its sockets
names       the replica of the registry's names that each frontend has
layout, packed   how an adapter's bytes lie in pages, and in files of page images
settings, main   what an operator sets, and the program loraplex-engine; cli/ is enginectl
metrics, observing, picture, log   what is shown: the table, who feeds it, the state, lines
failures    errors as plain values, to loraplex.status and back
"""
