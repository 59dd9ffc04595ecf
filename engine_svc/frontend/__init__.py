"""The engine's gRPC side, on one asyncio loop; never torch.

servicer → generate (one call) → inputs, sampling (what the client sent) → core_link (the core, as
this side sees it) → router → answer, choices (items become messages); text/ is tokens and text.
"""
